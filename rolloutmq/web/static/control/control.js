// Which state the run is in, who holds it, and what may be done about it; settings that change while
// it continues.

import { age, el, number, patch } from "../frame/draw.js";
import { ask } from "../frame/server.js";
import { findings } from "../run/findings.js";
import { act, post } from "./acts.js";
import { confirmed } from "./question.js";
import { settingList } from "./settings.js";

const MODES = {
  run: "lets it run", drain: "pauses it: running groups are finished", abort: "pauses it: running groups are returned with their tokens",
  keep: "pauses it: running groups are frozen", finish: "has finished it",
};
let places = null, thePage = null;

export const control = {
  async open(route, page) {
    thePage = page;
    places = { state: el("div"), findings: el("div"), settings: el("div", { class: "panel" }) };
    drawSettings();
    return [el("div", { class: "stack" }, places.state, el("h2", {}, "Findings"), places.findings, el("h2", {}, "Settings of the run"),
      el("p", { class: "dim" }, "Every process applies a change at its next heartbeat, round or batch. It lasts until the run is started again from its config file."), places.settings)];
  },
  update(snapshot) {
    patch(places.state, [state(snapshot)]);
    patch(places.findings, findings(snapshot));
  },
};

async function drawSettings() {
  try {
    const settings = await ask("settings");
    patch(places.settings, settingList(settings, thePage, drawSettings));
  } catch (error) {
    patch(places.settings, [el("p", { class: "bad" }, error.message)]);
  }
}

function state({ status, control }) {
  const late = control.live_workers.filter((id) => !status.acknowledged.includes(id));
  const receipts = status.mode === "run" || !control.live_workers.length ? null
    : late.length ? `${status.acknowledged.length} of ${control.live_workers.length} workers have confirmed; not yet: ${late.join(", ")}` : `all ${control.live_workers.length} live workers have confirmed`;
  const facts = [
    ["The operator", MODES[control.operator_mode] ?? control.operator_mode],
    ["The trainer", `${MODES[control.trainer_mode] ?? control.trainer_mode}${control.is_orphaned ? ", but it is gone" : ""}`],
    ["In effect", `${status.mode}, for ${age(status.mode_age_ms)}; control epoch ${status.epoch}`],
    receipts && ["Receipts", receipts],
    ["Trainer's role", role(status.trainer)],
    ["Producer's role", role(status.producer) + (control.producer_name ? ` (${control.producer_name})` : "")],
    ["Progress", `step ${number(status.steps.taken)} of ${number(control.last_step)} taken, ${number(status.steps.committed)} committed, ${number(status.steps.freed)} freed`],
    ["Weights", `${status.weights.version} of lineage ${status.weights.lineage || "–"}`],
  ].filter(Boolean);
  return el("section", { class: "panel", "aria-label": "State of the run" }, el("h2", {}, headline(status, control)),
    el("dl", { class: "facts" }, facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])), buttons(status, control));
}

const role = ({ state, silent_ms: silent }) => (state === "never opened" ? "nobody has held it yet" : state === "closed" ? `given up ${age(silent)} ago` : `${state}, last heartbeat ${age(silent)} ago`);

function headline(status, control) {
  if (status.stuck_on.length) return `The run waits until you restart task ${status.stuck_on.join(", ")}`;
  if (status.phase === "stopped") return "The run is stopped: no process of it is alive";
  if (status.mode === "run") return "The run is running";
  if (status.mode === "finish") return "The run is finished";
  if (control.is_orphaned && status.paused_by === "trainer") return "Paused by a trainer that is gone";
  return status.paused_by === "operator" ? "Paused by an operator" : "Paused by the trainer, for a weight update: it ends this pause by itself";
}

function buttons(status, control) {
  const page = thePage;
  if (!page.mayAct()) return el("p", { class: "dim" }, "This page only reads: it was opened without the token, or started with --read-only.");
  const made = [];
  if (status.mode !== "finish" && control.operator_mode === "run") made.push(pauseButton(status));
  if (control.operator_mode !== "run" && control.operator_mode !== "finish") made.push(act("resume", "Resume", page, null, () => {}));
  else if (control.is_orphaned) made.push(act("resume", "End the trainer's pause…", page, { title: "End the pause of the trainer?", text: "The trainer that paused the run is gone. Workers continue with the newest weights that were published.", yes: "Resume" }, () => {}));
  for (const [task, reason] of Object.entries(control.stopped_tasks)) {
    made.push(act(`tasks/${encodeURIComponent(task)}/resume`, `Restart task ${task}…`, page, { title: `Restart the task ${task}?`, text: [`It was stopped: ${reason}`, "Its consecutive failures are counted from 0 again."], yes: "Restart" }, () => {}));
  }
  return el("div", { class: "acts" }, made.length ? made : el("span", { class: "dim" }, "Nothing is left to do."));
}

function pauseButton({ leases }) {
  const running = `${number(leases)} ${leases === 1 ? "group runs" : "groups run"} now`;
  return el("button", { type: "button", class: "stops", "data-key": "pause", onclick: async () => {
    const mode = await confirmed({
      title: "Pause the run?", text: `${running}. No worker claims anything until somebody resumes the run; the trainer waits once its batches are used up.`, yes: "Pause", stops: true,
      choices: [["drain", "Finish them", "The running groups end as usual; the pause begins with the last of them."],
        ["abort", "Return them", "They go back to the queue with the tokens that they have."],
        ["keep", "Freeze them", "They stay in the engines and continue where they are."]],
    });
    if (mode) await post(`pause?mode=${mode}`, thePage);
  } }, "Pause…");
}
