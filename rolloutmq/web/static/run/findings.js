// What `rolloutmq doctor` finds: what stops the run, since when, and what to do.

import { age, code, el } from "../frame/draw.js";

const WORDS = { fault: "fault", stuck: "waits", error: "error", warning: "warning", note: "note" };

export function findings({ findings: found }) {
  const stops = found.filter(({ level }) => level !== "note"), notes = found.filter(({ level }) => level === "note");
  const folded = notes.length ? el("details", { class: "findings" }, el("summary", {}, `${notes.length} ${notes.length === 1 ? "note" : "notes"}`), list(notes)) : null;
  if (!stops.length) return [el("p", { class: "good" }, "Nothing stops this run"), folded];
  return [el("section", { class: "panel findings", "aria-label": "What stops this run" }, list(stops)), folded];
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
  return el("ul", {}, found.map(({ level, what, since_ms, fix, trace }) => el("li", { class: level },
    el("b", { class: "level" }, WORDS[level]), " ", what, since_ms === null ? "" : `, for ${age(since_ms)}`, trace ? el("pre", { class: "trace" }, trace) : null, fix ? el("div", { class: "dim" }, code(fix), " ", buttonsOf(fix)) : null)));
}
