// The settings that change while the run continues: what each does, its range, its value, a field. What was changed
// comes first, then the others by topic, then those of each task, folded.

import { code, el } from "../frame/draw.js";
import { confirmed } from "./question.js";
import { act, post } from "./acts.js";

export function settingList(settings, page, after) {
  const rows = (chosen) => chosen.map((setting) => settingRow(setting, page, after));
  const byTopic = (chosen) => [...new Set(chosen.map(({ topic }) => topic))].sort().flatMap((topic) => [el("h3", { class: "topic" }, topic), ...rows(chosen.filter((setting) => setting.topic === topic))]);
  const taskOf = ({ name }) => /^tasks\.(.+)\.\w+$/.exec(name)?.[1] ?? "";
  const changed = settings.filter((setting) => setting.changed), others = settings.filter((setting) => !setting.changed);
  const tasks = [...new Set(others.map(taskOf).filter(Boolean))];
  return [...(changed.length ? [el("h3", { class: "topic" }, "Changed since the start"), ...rows(changed)] : []), ...byTopic(others.filter((setting) => !taskOf(setting))), ...tasks.map((task) =>
    el("details", { class: "more", "data-key": task }, el("summary", {}, `Task ${task}`), byTopic(others.filter((setting) => taskOf(setting) === task))))];
}

function settingRow(setting, page, after) {
  const { name, value, doc, range, inherited, changed } = setting;
  const shown = value === null ? "not set" : String(value);
  const about = el("div", {}, el("div", { class: "name" }, name), el("div", {}, code(doc)), el("div", { class: "dim" }, [range, inherited ? "that of the run" : ""].filter(Boolean).join("; ")),
    changed ? el("div", { class: "near" }, `in the config: ${changed.config ?? "not set"}; set ${new Date(changed.set_ms).toLocaleString([], { hour12: false })}${changed.by ? ` by ${changed.by}` : ""}`) : null);
  if (!page.mayAct()) return el("div", { class: "setting", "data-key": name }, about, el("b", {}, shown));
  const path = (wanted) => `settings?${new URLSearchParams({ name, value: wanted })}`;
  const form = el("form", { onsubmit: async (event) => {
    event.preventDefault();
    const wanted = form.elements.value.value.trim();
    if (!wanted || wanted === String(value)) return;
    const isYes = await confirmed({ title: `Set ${name} to ${wanted}?`, text: [doc, `It is ${shown} now. Every process applies the change at its next heartbeat, round or batch.`], yes: "Set" });
    if (isYes && (await post(path(wanted), page))) after();
  } }, el("input", { name: "value", value: value === null ? "" : String(value), placeholder: shown, "aria-label": `value of ${name}`, autocomplete: "off" }), el("button", {}, "Set…"));
  const back = changed ? act(path("config"), "As in the config…", page, { title: `Set ${name} as in the config?`, text: `It is ${shown} now, and ${changed.config ?? "not set"} in the config.`, yes: "Set" }, after) : null;
  return el("div", { class: "setting", "data-key": `${name}=${value}` }, about, el("div", {}, form, back));
}
