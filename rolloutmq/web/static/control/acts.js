// What an operator does: buttons that post, shown only to whom may act.

import { el } from "../frame/draw.js";
import { ask, hasToken } from "../frame/server.js";

export function act(path, words, page) {
  return el("button", { type: "button", onclick: async () => {
    try { await ask(path, "POST"); page.trouble(""); } catch (error) { page.trouble(error.message); }
    page.reopen();
  } }, words);
}

export function acts(page) {
  document.getElementById("acts").hidden = !hasToken();
  for (const button of document.querySelectorAll("[data-act]")) {
    button.addEventListener("click", () => ask(button.dataset.act, "POST").then(() => page.trouble(""), (error) => page.trouble(error.message)));
  }
}
