// What `rolloutmq doctor` finds: what stops the run, since when, and what to do.

import { age, code, el } from "../frame/draw.js";
import { groupLink } from "../rollouts/rollouts.js";
import { showChart } from "./chart.js";

const WORDS = { fault: "fault", stuck: "waits", error: "error", warning: "warning", note: "note" };

export function findings({ findings: found }) {
  found = merged(found);
  const stops = found.filter(({ level }) => level !== "note"), notes = found.filter(({ level }) => level === "note");
  const folded = notes.length ? el("details", { class: "findings" }, el("summary", {}, `${notes.length} ${notes.length === 1 ? "note" : "notes"}`), list(notes)) : null;
  if (!stops.length) return [el("p", { class: "good" }, "Nothing stops this run"), folded];
  return [el("section", { class: "panel findings", "aria-label": "What stops this run" }, list(stops)), folded];
}

// What a finding says is the cause: each text after a colon.
const causesOf = (what) => what.split(": ").slice(1).map((_, at, parts) => parts.slice(at).join(": ")).filter((cause) => cause.length > 10);

export const hasCause = (found, text) => causesOf(text).some((cause) => found.some(({ what }) => what.includes(cause)));

// Each cause once: what has the cause of a worse finding stands below that.
function merged(found) {
  const kept = [];
  for (const finding of found) {
    const worse = kept.find((other) => causesOf(finding.what).some((cause) => other.what.includes(cause)));
    if (worse) worse.also.push(finding);
    else kept.push({ ...finding, also: [] });
  }
  return kept;
}

// A metric leads to its chart, a group to its page; a command is a text.
function lookAt(look) {
  if (/^[\w.-]+-\d{10}$/.test(look)) return groupLink(look);
  if (look.includes(" ")) return el("code", {}, look);
  return el("button", { type: "button", class: "link", onclick: () => { if (!showChart(look)) location.hash = `#/run?chart=${encodeURIComponent(look)}`; } }, look);
}

// The views where something can be done about a finding: their buttons do what the commands do.
const PLACES = [
  [/rolloutmq (dead|requeue|drop)/, "#/dead", "Open dead letters"],
  [/sample\.max_tokens/, "#/groups?outcome=truncated", "Open truncated"],
  [/rolloutmq tail/, "#/groups?outcome=filtered", "Open filtered"],
  [/rolloutmq resume --worker/, "#/workers", "Open workers"],
  [/\blogs?\b/, "#/logs?level=warning", "Open logs"],
  [/rolloutmq (resume(?! --worker)|set)\b/, "#/control", "Open control"],
];

const buttonsOf = (fix) => PLACES.filter(([words]) => words.test(fix)).flatMap(([, href, label]) => [el("a", { class: "button", href }, label), " "]);

function list(found) {
  return el("ul", {}, found.map(({ level, what, since_ms, fix, trace, look = [], also }) => el("li", { class: level },
    el("b", { class: "level" }, WORDS[level]), " ", what, since_ms === null ? "" : `, for ${age(since_ms)}`, trace ? el("pre", { class: "trace" }, trace) : null,
    look.length ? el("div", { class: "dim" }, "look at ", look.flatMap((each, at) => [at ? ", " : "", lookAt(each)])) : null,
    also.map((other) => el("div", { class: "dim" }, `also: ${other.what}`, other.trace && other.trace !== trace ? el("pre", { class: "trace" }, other.trace) : null, other.fix && other.fix !== fix ? [" ", code(other.fix), " ", buttonsOf(other.fix)] : null)),
    fix ? el("div", { class: "dim" }, code(fix), " ", buttonsOf(fix)) : null)));
}
