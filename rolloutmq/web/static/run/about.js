// What a run is: what people wrote about it, its facts, changed settings, versions, and its config.

import { code, el, table } from "../frame/draw.js";
import { ask, isServed, saved } from "../frame/server.js";
import { post } from "../control/acts.js";

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const section = (title, ...content) => el("section", { class: "panel" }, el("h2", {}, title), ...content);
const facts = (found) => el("dl", { class: "facts" }, Object.entries(found).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));

export const about = {
  async open(route, page) {
    const { facts: known, note, changed, versions, config } = saved ? saved.about : await ask("about");
    return [el("div", { class: "stack" },
      note && (note.written_ms || page.mayAct()) ? section("Note", page.mayAct() ? noteForm(note, page) : shownNote(note)) : null,
      el("div", { class: "panels pair" }, section("Run", facts(known)), section("Versions", facts(versions))),
      changed.length ? section("Changed since the start", table([["setting", ({ name }) => name], ["is", ({ value }) => asText(value)], ["in the config", ({ config: own }) => asText(own ?? "not set")],
        ["since", ({ set_ms: at }) => new Date(at).toLocaleString([], { hour12: false })], ["by", ({ by }) => by]], changed)) : null,
      config.length ? configOf(config) : isServed && !saved ? el("p", { class: "dim" }, code("The folder of the run has no config: `rolloutmq run` and `rolloutmq create` write it.")) : null)];
  },
};

function shownNote({ text, tags }) {
  return el("div", {}, el("p", { class: "note" }, text), tags.map((tag) => el("span", { class: "tag" }, tag)));
}

function noteForm(note, page) {
  const form = el("form", { class: "note", onsubmit: async (event) => {
    event.preventDefault();
    const { text, tags } = form.elements;
    if (await post(`note?${new URLSearchParams({ text: text.value, tags: tags.value, seen: note.written_ms || "" })}`, page)) page.reopen();
  } },
  el("label", {}, "What this run is for, and what came of it", el("textarea", { name: "text", rows: "3", maxlength: "4000" }, note.text)),
  el("label", {}, "Tags, with spaces between them", el("input", { name: "tags", value: note.tags.join(" "), autocomplete: "off" })),
  el("button", {}, "Save"));
  return form;
}

// The keys that the config gives; on demand, those with their defaults.
function configOf(keys) {
  const given = keys.filter(([, , source]) => source !== "default");
  const place = el("div"), search = el("input", { type: "search", "aria-label": "Find a key", placeholder: "find a key", oninput: () => draw() });
  const all = el("input", { type: "checkbox", onchange: () => draw() });
  const draw = () => {
    const shown = (all.checked || search.value ? keys : given).filter(([name]) => name.includes(search.value.trim()));
    place.replaceChildren(table([["key", ([name]) => el("code", {}, name), "text"], ["value", ([, value, source]) => [asText(value ?? "not set"), el("small", { class: "dim" }, ` ${source}`)], "text"]], shown));
  };
  draw();
  return el("section", { class: "panel" }, el("div", { class: "heading" }, el("h2", {}, "Config"), el("div", { class: "tools" }, search, el("label", {}, all, ` with ${keys.length - given.length} defaults`))), place);
}
