"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const hover = document.getElementById("hover");
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; });

  // The values under the pointer at once, and under a finger at all; without this script the browser shows the titles.
  const texts = new WeakMap();
  const leave = () => { hover.hidden = true; };
  const tell = (event) => {
    const hit = event.target.closest(".hit");
    if (!hit) return leave();
    const title = hit.querySelector("title");
    if (title) { texts.set(hit, title.textContent); title.remove(); }
    hover.textContent = texts.get(hit);
    hover.hidden = false;
    const room = root.clientWidth - hover.offsetWidth - 8;
    hover.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
    hover.style.top = `${Math.max(8, event.clientY - hover.offsetHeight - 12)}px`;
  };
  addEventListener("pointermove", tell);
  addEventListener("pointerdown", tell);
  addEventListener("scroll", leave, { passive: true });

  // All rollouts, unpacked by the browser itself; a click on a curve's point shows those of its step.
  const data = document.getElementById("rollout-data");
  if (!data) return;
  const browser = new RolloutBrowser(document.getElementById("rollouts"), "No rollouts were recorded.");
  let rollouts = { prompts: [], rows: [], alarms: [] }, chosen = null;
  const fits = ([stage]) => !chosen || chosen.has(stage);
  const fill = () => browser.set(
    rollouts.rows.filter(fits).map(([stage, step, prompt, response, proxy, stop, tokens, turns, reason]) => ({ stage, step, prompt: rollouts.prompts[prompt], response, proxy, stop, tokens, turns, reason })),
    rollouts.alarms.filter(fits).map(([stage, detector, step]) => ({ stage, detector, step })));
  unpacked("rollout-data").then((value) => { rollouts = value; fill(); });
  // the sliders of a sweep choose runs
  addEventListener("setting", (event) => { chosen = event.detail; fill(); });
  addEventListener("click", (event) => {
    const hit = event.target.closest(".hit"), step = hit && /^step ([\d,]+)/.exec(texts.get(hit) || "");
    if (step) browser.choose(Number(step[1].replaceAll(",", "")));
  });
})();
