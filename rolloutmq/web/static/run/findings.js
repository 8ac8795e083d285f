// What `rolloutmq doctor` finds: what stops the run, since when, and what to do.

import { age, code, el } from "../frame/draw.js";

const WORDS = { fault: "fault", stuck: "waits", error: "error", warning: "warning", note: "note" };

export function findings({ findings: found }) {
  const stops = found.filter(({ level }) => level !== "note"), notes = found.filter(({ level }) => level === "note");
  const folded = notes.length ? el("details", { class: "findings" }, el("summary", {}, `${notes.length} ${notes.length === 1 ? "note" : "notes"}`), list(notes)) : null;
  if (!stops.length) return [el("p", { class: "good" }, "Nothing stops this run"), folded];
  return [el("section", { class: "panel findings", "aria-label": "What stops this run" }, list(stops)), folded];
}

// The view where something can be done about a finding: its buttons do what the command does.
function placeOf(fix) {
  if (/rolloutmq (dead|requeue|drop)/.test(fix)) return button("#/dead", "Open dead letters");
  if (/sample\.max_tokens/.test(fix)) return button("#/groups?outcome=truncated", "Open truncated");
  if (/rolloutmq tail/.test(fix)) return button("#/groups?outcome=filtered", "Open filtered");
  if (/rolloutmq resume --worker/.test(fix)) return button("#/workers", "Open workers");
  if (/\blogs?\b/.test(fix)) return button("#/logs?level=warning", "Open logs");
  return /rolloutmq (resume|set)/.test(fix) ? button("#/control", "Open control") : null;
}

const button = (href, words) => el("a", { class: "button", href }, words);

function list(found) {
  return el("ul", {}, found.map(({ level, what, since_ms, fix, trace }) => el("li", { class: level },
    el("b", { class: "level" }, WORDS[level]), " ", what, since_ms === null ? "" : `, for ${age(since_ms)}`, trace ? el("pre", { class: "trace" }, trace) : null, fix ? el("div", { class: "dim" }, code(fix), " ", placeOf(fix)) : null)));
}
