// Light or dark: as the system, or as chosen with the button. Runs before the page is drawn.

(() => {
  const NEXT = { auto: "light", light: "dark", dark: "auto" };
  const WORDS = { auto: "as the system", light: "light", dark: "dark" };
  const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
  const root = document.documentElement;
  const chosen = () => (localStorage.getItem("theme") in NEXT ? localStorage.getItem("theme") : "auto");

  function apply() {
    if (chosen() === "auto") delete root.dataset.theme;
    else root.dataset.theme = chosen();
    const button = document.getElementById("theme");
    if (!button) return;
    button.textContent = SIGNS[chosen()];
    button.setAttribute("aria-label", `Colours: ${WORDS[chosen()]}`);
    button.title = `Colours: ${WORDS[chosen()]}`;
  }

  apply();
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem("theme", NEXT[chosen()]);
      apply();
      dispatchEvent(new Event("themechange"));
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
})();
