// The processes that `rolloutmq run` started on its machine: how often, and how each ended last.

import { el, table } from "../frame/draw.js";

const when = (seconds) => new Date(1000 * seconds).toLocaleString([], { hour12: false });

export const processes = {
  title: "Processes", path: "processes",
  draw: (found) => (found?.length ? [table([["process", (p) => p.process], ["last start", (p) => when(p.started_s)], ["restarts", (p) => el("span", { class: p.starts > 1 ? "near" : "dim" }, p.starts - 1), true],
    ["last exit", (p) => (p.ended_s ? `${when(p.ended_s)}: ${p.end}` : "–"), "text"]], found)] : null),
};
