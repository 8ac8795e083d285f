// The newest events of the run, of all kinds or of one.

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

function draw() {
  const names = [...new Set([...newest.map(({ event }) => event), kinds.value].filter(Boolean))].sort();
  const chosen = kinds.value;
  patch(kinds, [el("option", { value: "" }, "all kinds"), ...names.map((name) => el("option", { value: name }, name))]);
  kinds.value = chosen;
  const shown = newest.filter(({ event }) => !chosen || event === chosen);
  patch(place, [table([["when", ({ at_ms }) => new Date(at_ms).toLocaleTimeString([], { hour12: false })], ["event", ({ event }) => event], ["", details, "text"]], shown)]);
}

function details({ at_ms, event, ...fields }) {
  return el("span", {}, Object.entries(fields).flatMap(([name, value]) => [el("span", { class: "dim" }, `${name} `), linked(name, value), " "]));
}

function linked(name, value) {
  if (name === "gid" || name === "first") return groupLink(value);
  return name === "worker" ? el("a", { href: `#/workers/${encodeURIComponent(value)}` }, value) : value;
}
