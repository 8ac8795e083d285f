// The workers of the run.

import { age, el, number, table } from "../frame/draw.js";

const place = el("div");

export const workers = {
  open: () => [place],
  update({ status }) {
    const newest = `${status.weights.lineage}:${status.weights.version}`;
    const columns = [
      ["worker", (w) => w.id], ["engine", (w) => w.engine], ["state", (w) => w.state],
      ["weights", (w) => el("span", { class: w.weights === newest ? "" : "near" }, w.weights || "–")],
      ["seen", (w) => `${age(w.silent_ms)} ago`, true], ["holds", (w) => w.holds, true], ["judging", (w) => number(w.judging), true], ["tokens/s", (w) => number(w.tokens_per_s), true], ["done", (w) => number(w.done), true],
    ];
    place.replaceChildren(status.workers.length ? table(columns, status.workers) : el("p", { class: "near" }, "no worker has registered"));
  },
};
