"use strict";
(() => {
  const source = document.getElementById("drawings").textContent;
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 640px)");
  const touch = matchMedia("(pointer: coarse)");
  const config = { displayModeBar: false, responsive: false, showTips: false, doubleClick: "reset" };

  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  function dress(drawing) {
    const ink = colour("ink"), quiet = colour("muted"), grid = colour("grid"), small = phone.matches;
    const layout = drawing.layout;
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 12.5, color: ink };
    layout.hoverlabel = { bgcolor: colour("card"), bordercolor: quiet, font: { color: ink } };
    const entries = layout.showlegend ? drawing.data.filter((trace) => trace.showlegend !== false).length : 0;
    if (small) layout.height += 16 * Math.max(0, entries - 2);
    layout.dragmode = touch.matches ? false : "zoom";
    for (const key of Object.keys(layout).filter((k) => /^[xy]axis/.test(k))) {
      Object.assign(layout[key], { gridcolor: grid, linecolor: quiet, tickcolor: grid, zerolinecolor: grid });
      if (layout[key].title) layout[key].title.font = { size: small ? 11 : 12.5, color: quiet };
      layout[key].fixedrange = touch.matches;
    }
    return drawing;
  }

  function drawings() {
    const replaced = { "@muted": colour("muted"), "@faint": colour("faint"), "#0072B2": colour("blue") };
    return JSON.parse(source, (_, value) => (typeof value === "string" && Object.hasOwn(replaced, value) ? replaced[value] : value));
  }

  function draw(all) {
    const plots = drawings();
    for (const element of document.querySelectorAll(".plot")) {
      if (element.offsetParent === null && !all) continue;
      const { data, layout } = dress(plots[element.id]);
      Plotly.react(element, data, { ...layout, width: element.clientWidth }, config);
    }
  }

  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(false); } });
  system.addEventListener("change", () => draw(false));
  for (const block of document.querySelectorAll("details")) block.addEventListener("toggle", () => draw(false));
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; draw(false); });
  draw(false);
})();
