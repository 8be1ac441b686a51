"use strict";
// The sliders of a sweep: they show the view of a setting, light its marks, and change the answers to the same prompts.
(() => {
  const views = [...document.querySelectorAll(".view")], sliders = [...document.querySelectorAll(".slider input")];
  const now = document.getElementById("now"), place = document.getElementById("answers");
  let runs = null, answers = null, setting = views.findIndex((view) => !view.hidden);

  const light = () => {
    for (const path of document.querySelectorAll("#at-frontier path, #at-settings path")) {
      path.classList.toggle("on", path.classList.contains(`s${setting}`));
    }
  };
  const show = () => {
    views.forEach((view, number) => { view.hidden = number !== setting; });
    now.textContent = views[setting].dataset.sentence;
    light();
    if (!runs) return;
    if (answers) answers.show(runs[setting]);
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

  class Answers {
    static SHOWN = 6;
    constructor(root, { judge, prompts, runs, texts }) {
      Object.assign(this, { root, judge, prompts, answers: runs, texts, shown: Answers.SHOWN, runs: [] });
      const controls = makeElement("div", "controls");
      const field = (text, input) => {
        const label = makeElement("label", "", text);
        label.append(input); controls.append(label);
        input.addEventListener("input", () => { this.order = this.run = null; this.shown = Answers.SHOWN; this.list(); });
        return input;
      };
      this.seed = field("Run ", makeElement("select")); this.sort = field("Order ", makeElement("select")); this.text = field("Text ", makeElement("input"));
      this.text.type = "search"; this.text.autocomplete = "off";
      for (const [value, name] of [["apart", "where settings differ most"], ["low", "worst here first"], ["high", "best here first"], ["file", "as in the file"]]) {
        this.sort.append(new Option(name, value));
      }
      this.count = makeElement("p", "quiet"); this.count.setAttribute("role", "status");
      this.cards = makeElement("div"); this.more = makeElement("button", "", "Show more"); this.more.type = "button";
      this.more.addEventListener("click", () => {
        const first = this.cards.children.length;
        this.shown += Answers.SHOWN; this.list(); focusOn(this.cards.children[first]);
      });
      root.replaceChildren(controls, this.count, this.cards, this.more);
      const spread = (at) => {
        const scores = Object.values(runs).map((rows) => rows[at] && rows[at][1]).filter(Number.isFinite);
        return scores.length ? Math.max(...scores) - Math.min(...scores) : -1;
      };
      this.spreads = prompts.map((_, at) => spread(at));
    }
    show(runs) {
      const before = this.seed.selectedIndex;
      this.runs = runs;
      this.seed.replaceChildren(...runs.map(([label, name]) => new Option(name || "the only one", label)));
      this.seed.selectedIndex = runs.length ? Math.max(0, Math.min(before, runs.length - 1)) : -1;
      this.seed.parentElement.hidden = runs.length < 2;
      this.list();
    }
    list() {
      const rows = this.answers[this.seed.value] || [], words = this.text.value.trim().toLowerCase();
      const text = (number) => this.texts[number], score = (at) => rows[at][1];
      let places = this.prompts.map((_, at) => at).filter((at) => rows[at]);
      if (words) places = places.filter((at) => `${text(this.prompts[at])}\n${text(rows[at][0])}`.toLowerCase().includes(words));
      const by = { apart: (a, b) => this.spreads[b] - this.spreads[a], low: (a, b) => score(a) - score(b), high: (a, b) => score(b) - score(a), file: (a, b) => a - b };
      places.sort(by[this.sort.value]);
      this.count.textContent = this.runs.length ? `${places.length} answers of ${this.seed.value}` : "This setting has not run yet.";
      this.cards.replaceChildren(...places.slice(0, this.shown).map((at) => this.card(text(this.prompts[at]), rows[at])));
      this.more.hidden = places.length <= this.shown;
    }
    card(prompt, [answer, score, start, startScore]) {
      const box = makeElement("article", "answer"), sides = makeElement("div", "sides");
      for (const [name, number, value, className] of [["The start", start, startScore, "before"], ["This setting", answer, score, "after"]]) {
        const side = makeElement("div", `side ${className}`), head = makeElement("span", "", `${name} · ${this.judge} `);
        head.append(makeElement("b", "", scoreNumber(value)));
        side.append(head, longText("text", this.texts[number])); sides.append(side);
      }
      box.append(longText("text prompt", prompt), sides);
      return box;
    }
  }
  const begin = async () => {
    runs = await unpacked("sweep-data");
    if (place) answers = new Answers(place, await unpacked("answer-data"));
    show();
  };
  begin();
})();
