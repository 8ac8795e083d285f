// The settings that change while the run continues: what each does, its range, its value, a field.

import { code, el } from "../frame/draw.js";
import { confirmed } from "./question.js";
import { post } from "./acts.js";

// Those of the run first, then those of each task, folded.
export function settingList(settings, page, after) {
  const row = (setting) => settingRow(setting, page, after);
  const taskOf = ({ name }) => /^tasks\.(.+)\.\w+$/.exec(name)?.[1] ?? "";
  const tasks = [...new Set(settings.map(taskOf).filter(Boolean))];
  return [...settings.filter((setting) => !taskOf(setting)).map(row), ...tasks.map((task) =>
    el("details", { class: "more", "data-key": task }, el("summary", {}, `Task ${task}`), settings.filter((setting) => taskOf(setting) === task).map(row)))];
}

function settingRow(setting, page, after) {
  const { name, value, doc, range, inherited } = setting;
  const shown = value === null ? "not set" : String(value);
  const about = el("div", {}, el("div", { class: "name" }, name), el("div", {}, code(doc)), el("div", { class: "dim" }, [range, inherited ? "that of the run" : ""].filter(Boolean).join("; ")));
  if (!page.mayAct()) return el("div", { class: "setting", "data-key": name }, about, el("b", {}, shown));
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    const wanted = form.elements.value.value.trim();
    if (!wanted || wanted === String(value)) return;
    const isYes = await confirmed({ title: `Set ${name} to ${wanted}?`, text: [doc, `It is ${shown} now. Every process applies the change at its next heartbeat, round or batch.`], yes: "Set" });
    if (isYes && (await post(`settings?${new URLSearchParams({ name, value: wanted })}`, page))) after();
  } }, el("input", { name: "value", value: value === null ? "" : String(value), placeholder: shown, "aria-label": `value of ${name}`, autocomplete: "off" }), el("button", {}, "Set…"));
  return el("div", { class: "setting", "data-key": `${name}=${value}` }, about, form);
}
