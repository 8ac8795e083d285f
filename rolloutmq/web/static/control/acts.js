// What an operator does: buttons that ask first where work stops or ends, then post.

import { el } from "../frame/draw.js";
import { ask } from "../frame/server.js";
import { confirmed } from "./question.js";

// Post, and show what the server answered: the error, or `said` in words.
export async function post(path, page) {
  try {
    const answer = await ask(path, "POST");
    page.trouble("");
    return answer;
  } catch (error) {
    page.trouble(error.message);
    return null;
  }
}

// A button that posts to `path`; `question` (see confirmed) is asked before.
export function act(path, words, page, question = null, after = () => page.reopen()) {
  return el("button", { type: "button", "data-key": path, class: question?.stops ? "stops" : "", onclick: async () => {
    if (question && !(await confirmed(question))) return;
    if (await post(path, page)) after();
  } }, words);
}

// The buttons of one group, for what its stage allows.
export function groupActs(gid, may, page) {
  if (!page.mayAct() || !may.length) return null;
  const dropped = { title: `Drop ${gid}?`, text: "The group ends: its payload is freed, and its prompt is not drawn again.", yes: "Drop", stops: true };
  const requeued = { title: `Requeue ${gid}?`, text: "Its result is discarded; it starts again from its prompt, with all its tries.", yes: "Requeue" };
  return el("p", { class: "acts" }, may.map((verb) => act(`groups/${encodeURIComponent(gid)}/${verb}`, verb === "drop" ? "Drop…" : "Requeue…", page, verb === "drop" ? dropped : requeued)));
}
