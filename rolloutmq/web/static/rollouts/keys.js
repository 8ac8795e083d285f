// The keys of the rollouts page: of a list of rows or rollouts, one is selected.

import { el } from "../frame/draw.js";

const HELP = [["j, k", "next, previous"], ["Enter", "open the selected group"], ["u", "back to the list"], ["v", "rendered, text, tokens"], ["d", "differences from the selected rollout"],
  ["[, ]", "previous, next group of the list; in a list, page or step"], ["e", "all responses of the selected group"], ["/", "search"], ["1 to 9", "the views"], ["?", "this help"]];
let actions = {};

export function showHelp() {
  const help = el("dialog", { "aria-label": "keys", onclick: () => help.close() }, el("h2", {}, "Keys"),
    el("dl", {}, HELP.flatMap(([keys, words]) => [el("dt", {}, keys.split(", ").map((key) => [el("kbd", {}, key), " "]).flat()), el("dd", {}, words)])));
  help.addEventListener("close", () => help.remove());
  document.body.append(help);
  help.showModal();
}

// Select an element of a list by one step, and bring it into view.
export function selectNext(items, step) {
  if (!items.length) return;
  const at = items.findIndex((item) => item.classList.contains("selected"));
  const next = items[Math.min(Math.max(at + step, 0), items.length - 1)];
  for (const item of items) item.classList.toggle("selected", item === next);
  next.scrollIntoView({ block: "nearest" });
  next.querySelector("a, [tabindex]")?.focus({ preventScroll: true });
}

// The actions of the open view by key; {} when it is closed.
export function setKeys(wanted) { actions = wanted; }

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !Object.keys(actions).length || document.querySelector("dialog[open]")) return;
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const action = event.key === "?" ? showHelp : actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
