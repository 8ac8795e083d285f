// What `rolloutmq doctor` finds: what stops the run, since when, and what to do.

import { age, code, el } from "../frame/draw.js";

const WORDS = { fault: "fault", stuck: "waits", note: "note" };

export function findings({ findings: found }) {
  if (!found.some(({ level }) => level !== "note")) {
    const notes = found.length ? [el("details", { class: "findings" }, el("summary", {}, el("span", { class: "good" }, "Nothing stops this run"), ` · ${found.length} ${found.length === 1 ? "note" : "notes"}`), list(found))] : [el("p", { class: "good" }, "Nothing stops this run")];
    return notes;
  }
  return [el("section", { class: "panel findings", "aria-label": "What stops this run" }, list(found))];
}

function list(found) {
  return el("ul", {}, found.map(({ level, what, since_ms, fix }) => el("li", { class: level },
    el("b", { class: "level" }, WORDS[level]), " ", what, since_ms === null ? "" : `, for ${age(since_ms)}`, fix ? el("div", { class: "dim" }, code(fix)) : null)));
}
