// Dead letters, grouped by their cause, with what may be done for all of one cause.

import { age, code, el, number, table } from "../frame/draw.js";
import { ask } from "../frame/server.js";
import { groupLink } from "../rollouts/rollouts.js";
import { act } from "./acts.js";

let shown = null;

export const dead = {
  async open(route, page) {
    const { total, read, causes } = await ask("dead");
    shown = total;
    if (!total) return [el("p", { class: "good" }, "no dead letters")];
    return [el("p", {}, `${number(total)} ${total === 1 ? "group" : "groups"} failed in every try, or could not be read by the trainer. `,
      el("span", { class: "dim" }, "Fix the cause, then requeue them: they start again from their prompts.")),
    read < total ? el("p", { class: "near" }, `only the newest ${number(read)} are grouped`) : null,
    el("div", { class: "stack" }, causes.map((cause) => card(cause, page)))];
  },
  update(snapshot) {
    document.getElementById("newer")?.remove();
    if (!snapshot || shown === null || snapshot.status.dead_letters === shown) return;
    const { status } = snapshot;
    const refresh = el("button", { type: "button", id: "newer", onclick: () => dispatchEvent(new Event("hashchange")) }, `there are ${number(status.dead_letters)} now: show them`);
    document.getElementById("view").prepend(refresh);
  },
};

function card({ cause, count, tasks, workers, newest_ms: newest, trace, letters }, page) {
  const many = `${number(count)} ${count === 1 ? "group" : "groups"}`;
  const query = new URLSearchParams({ cause });
  const buttons = page.mayAct() ? el("div", { class: "acts" },
    act(`dead/requeue?${query}`, count === 1 ? "Requeue…" : `Requeue all ${number(count)}…`, page, { title: `Requeue ${many}?`, text: [`Cause: ${cause}`, "They get all their tries back and start again from their prompts."], yes: "Requeue" }),
    act(`dead/drop?${query}`, count === 1 ? "Drop…" : `Drop all ${number(count)}…`, page, { title: `Drop ${many}?`, text: [`Cause: ${cause}`, "They end: their payloads are freed, and their prompts are not drawn again."], yes: "Drop", stops: true })) : null;
  const again = trace && letters.find((letter) => letter.has_responses);
  const columns = [["group", (l) => groupLink(l.gid)], ["age", (l) => age(l.age_ms), true], ["tries", (l) => l.tries, true], ["worker", (l) => l.worker || "–"], ["batch", (l) => l.step ?? "–", true], ["responses", (l) => (l.has_responses ? "kept" : "–")], ["reason", (l) => l.reason]];
  return el("section", { class: "panel cause", "data-cause": cause }, el("h3", {}, cause),
    el("p", { class: "dim" }, `${many} of ${tasks.join(", ")}${workers.length ? `, on ${workers.slice(0, 6).join(", ")}${workers.length > 6 ? ` and ${workers.length - 6} more` : ""}` : ""}; the newest ${age(newest)} ago`),
    trace ? el("pre", { class: "trace" }, trace) : null, again ? el("p", { class: "dim" }, code(`\`rolloutmq rejudge ${again.gid} --pdb\` runs its judge on these responses again`)) : null,
    buttons, el("details", { open: count <= 3 }, el("summary", {}, count > letters.length ? `the newest ${letters.length}` : "groups"), table(columns, letters)));
}
