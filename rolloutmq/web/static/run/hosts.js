// The hosts of the run: which processes are there, and how much of each is in use.

import { bytes, el, number, table } from "../frame/draw.js";

const part = (used, total, shown) => (total ? el("span", { class: "used" }, el("progress", { max: total, value: used, "aria-label": shown }), ` ${shown}`) : "–");
const percent = (value) => part(value ?? 0, value === undefined ? 0 : 100, `${number(value ?? null)} %`);
const memory = (used, total) => part(used, total, `${bytes(used ?? 0)} of ${bytes(total ?? 0)}`);

// columns that no host has are left out
const COLUMNS = [
  ["processor", "busy_percent", (h) => percent(h.busy_percent)], ["memory", "memory_bytes", (h) => memory(h.memory_bytes, h.memory_total_bytes)],
  ["GPUs", "gpu_busy_percent", (h) => percent(h.gpu_busy_percent)], ["GPU memory", "gpu_memory_bytes", (h) => memory(h.gpu_memory_bytes, h.gpu_memory_total_bytes)],
  ["disk free", "disk_free_bytes", (h) => (h.disk_free_bytes === undefined ? "–" : bytes(h.disk_free_bytes))],
];

export const hosts = {
  title: "Hosts", path: "hosts",
  draw: (found) => (found?.length ? [table([["host", (h) => h.host], ["processes", (h) => (h.processes.length > 8 ? `${h.processes.slice(0, 8).join(", ")} and ${h.processes.length - 8} more` : h.processes.join(", ")), "text"],
    ...COLUMNS.filter(([, name]) => found.some((host) => host[name] !== undefined)).map(([title, , show]) => [title, show])], found)] : null),
};
