// The run at one glance: curves, who waits, memory, and the groups of each task by stage.

import { bar, bytes, curve, el, number, panel, table } from "../frame/draw.js";

const STAGES = ["waiting", "running", "completed", "aborted", "expired", "taken", "archived", "filtered", "dropped", "dead"];
const place = el("div", { class: "panels" });

export const overview = {
  open: () => [place],
  update({ status, waits, curves }) {
    const tasks = Object.entries(status.tasks);
    place.replaceChildren(groupsByStage(tasks), ...charts(curves), waiting(waits), memory(status), ...tasks.map(task));
  },
};

function charts(curves) {
  return [["Reward", "rewards/mean", 3], ["Tokens per second", "tokens_per_s", 0], ["Seconds per train step", "time/step_s", 2], ["Mean staleness", "staleness/mean", 2]]
    .filter(([, name]) => curves[name].length)
    .map(([title, name, digits]) => panel(title, number(curves[name].at(-1), digits), curve(title, curves[name])));
}

function waiting(waits) {
  return panel("Waiting", "share of the observed time", Object.entries(waits).map(([who, wait]) => bar(who, wait.share, 1, `${number(100 * wait.share)} %`, wait.now ? "near" : "")));
}

function memory({ memory: { held_bytes, low_bytes, high_bytes } }) {
  return panel("Memory", null, ...(high_bytes
    ? [bar("payloads", held_bytes, high_bytes, bytes(held_bytes)), el("p", { class: "dim" }, `new prompts wait above ${bytes(low_bytes)}`)]
    : [el("p", {}, `payloads hold ${bytes(held_bytes)}`), el("p", { class: "dim" }, "no limit is set")]));
}

function task([name, task]) {
  const ages = Object.entries(task.staleness), most = Math.max(1, ...ages.map(([, n]) => n));
  return panel(name, `mean score ${number(task.mean_reward, 3)}`,
    bar("ahead", task.started, task.may_start || task.started, `${task.started} / ${task.may_start}`, task.may_start && task.started >= task.may_start ? "near" : ""),
    ages.map(([staleness, n]) => bar(`staleness ${staleness}`, n, most, number(n))),
    task.too_old ? el("p", { class: "near" }, `${task.too_old} too old, about to expire`) : null,
    task.ended_early ? el("p", { class: "dim" }, `${task.ended_early} ended early, too old (${number(task.discarded_tokens)} tokens)`) : null,
    task.trouble ? el("p", { class: "bad" }, task.trouble) : null);
}

function groupsByStage(tasks) {
  const count = (n) => el("span", { class: n ? "" : "dim" }, number(n));
  const columns = [["stage", (row) => row], ...tasks.map(([name, task]) => [name, (row) => count(task.places[row]), true])];
  const groups = panel("Groups by stage", null, table(columns, STAGES));
  groups.classList.add(tasks.length > 3 ? "wide" : "tall");
  return groups;
}
