"use strict";
// The sliders of a sweep: they show the view of a setting, light its marks, and choose the rollouts.
(() => {
  const views = [...document.querySelectorAll(".view")], sliders = [...document.querySelectorAll(".slider input")];
  const now = document.getElementById("now");
  let runs = null, setting = views.findIndex((view) => !view.hidden);

  const light = () => {
    for (const path of document.querySelectorAll("#at-verdict path, #at-frontier path, #at-settings path")) {
      path.classList.toggle("on", path.classList.contains(`s${setting}`));
    }
  };
  const show = () => {
    views.forEach((view, number) => { view.hidden = number !== setting; });
    now.textContent = views[setting].dataset.sentence;
    light();
    if (!runs) return;
    dispatchEvent(new CustomEvent("setting", { detail: new Set(runs[setting].map(([label]) => label)) }));
  };
  const moved = () => {
    // the settings are in the order of the last key first, as digits of a number are
    setting = sliders.reduce((number, slider) => number * (Number(slider.max) + 1) + Number(slider.value), 0);
    for (const slider of sliders) {
      const value = slider.parentElement.querySelectorAll(".stops span")[slider.value].textContent;
      slider.setAttribute("aria-valuetext", value);
      slider.parentElement.querySelector("output").textContent = value;
    }
    show();
  };
  for (const slider of sliders) slider.addEventListener("input", moved);
  light();
  // the sliders stay on top, and what a link or the Tab key leads to stands below them
  const fixed = document.querySelector(".sliders");
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingTop = `${fixed.offsetHeight + 8}px`; }).observe(fixed);

  const begin = async () => {
    runs = await unpacked("sweep-data");
    show();
  };
  begin();
})();
