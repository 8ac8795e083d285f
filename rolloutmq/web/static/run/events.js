// The newest events of the run, of all kinds or of one. Of all kinds, events of one cause are a single row: changes of
// the control state, which come with each weight update, or the groups that a worker completes.

import { el, patch, table } from "../frame/draw.js";
import { groupLink } from "../rollouts/rollouts.js";

const place = el("div"), kinds = el("select", { "aria-label": "Kind of event", onchange: () => draw() });
let newest = [];

export const events = {
  open: () => [el("div", { class: "heading" }, el("h2", {}, "Newest events"), el("div", { class: "tools" }, el("label", {}, "show ", kinds))), place],
  update(snapshot) {
    newest = [...snapshot.events].reverse();
    draw();
  },
};

const clock = (at) => new Date(at).toLocaleTimeString([], { hour12: false });

function draw() {
  const names = [...new Set([...newest.map(({ event }) => event), kinds.value].filter(Boolean))].sort();
  const chosen = kinds.value;
  patch(kinds, [el("option", { value: "" }, "all kinds"), ...names.map((name) => el("option", { value: name }, name))]);
  kinds.value = chosen;
  const shown = chosen ? newest.filter(({ event }) => event === chosen).map((event) => [event]) : folded(newest);
  patch(place, [table([["when", ([{ at_ms: at }]) => clock(at)], ["event", ([{ event }, ...more]) => (more.length ? `${event} × ${more.length + 1}` : event)], ["", all, "text"]], shown)]);
}

const CAUSE = ["event", "by", "worker", "task", "reason", "kind", "place", "field"];
const keyOf = (event) => CAUSE.map((name) => event[name] ?? "").join(" ");

// Lists of events that are one row: the newest first.
function folded(found) {
  const rows = new Map();
  for (const event of found) {
    const key = keyOf(event);
    rows.set(key, [...(rows.get(key) ?? []), event]);
  }
  return [...rows.values()];
}

function all([event, ...earlier]) {
  if (!earlier.length) return details(event);
  return el("details", { "data-key": keyOf(event) }, el("summary", {}, details(event)), earlier.map((each) => el("div", {}, el("span", { class: "dim" }, clock(each.at_ms)), " ", details(each))));
}

function details({ at_ms, event, ...fields }) {
  return el("span", {}, Object.entries(fields).flatMap(([name, value]) => [el("span", { class: "dim" }, `${name} `), linked(name, value), " "]));
}

function linked(name, value) {
  if (name === "gid" || name === "first") return groupLink(value);
  return name === "worker" ? el("a", { href: `#/workers/${encodeURIComponent(value)}` }, value) : value;
}
