// The differences of two responses, word by word.

import { el } from "../frame/draw.js";
import { visible } from "./said.js";

const TIME_MS = 500;

// What `text` has and `base` lacks is inserted, the opposite deleted.
export function differences(base, text) {
  const parts = window.Diff.diffWordsWithSpace(visible(base), visible(text), { timeout: TIME_MS });
  if (!parts) return el("p", { class: "near" }, "these texts are too different, or too long, to compare");
  return el("div", { class: "said", dir: "auto" }, parts.map((part) => (part.added ? el("ins", {}, part.value) : part.removed ? el("del", {}, part.value) : part.value)));
}
