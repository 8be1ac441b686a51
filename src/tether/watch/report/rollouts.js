"use strict";
// A browser of rollouts: controls, a histogram of their scores, and the answers. Texts are set as text, so none can act.
const minus = (text) => text.replaceAll("-", "−");
const shortNumber = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(value.toExponential(2));
  if (Number.isInteger(value)) return minus(value.toLocaleString("en"));
  return minus(size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4))));
};
// A score as the page's own tables have it: about three digits, all of a large number.
const scoreNumber = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size <= 1e-12) return "0";
  const places = size < 1e-3 ? 4 : size < 1 ? 3 : size < 10 ? 2 : 1;
  const text = size < 1e-4 ? size.toExponential(1).replace(/-(\d)$/, "-0$1") : size < 100 ? size.toFixed(places) : Math.round(size).toLocaleString("en");
  return value < 0 ? `−${text}` : text;
};
const makeElement = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
// Puts the focus on an element that the Tab key passes over.
const focusOn = (element) => {
  if (!element) return;
  element.tabIndex = -1; element.focus({ preventScroll: true });
};

// A paragraph, which the keyboard reaches where it scrolls.
const longText = (className, text) => {
  const part = makeElement("p", className, text); part.dir = "auto";
  if (text.length > 400 || text.split("\n").length > 8) part.tabIndex = 0;
  return part;
};
// What a page carries as base64 of gzipped JSON, unpacked by the browser itself.
const unpacked = async (id) => {
  const text = document.getElementById(id).content.textContent.trim();
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
};

// The tokens of an answer on a ground that says how far a number lies above 0 (blue) or below it (orange); masked ones are struck out.
// Those of an environment were read alone, and have no number.
const shadedTokens = (tokens, name) => {
  const values = tokens[name], most = Math.max(...values.map(Math.abs)) || 1, part = makeElement("p", "text"), order = values.map((_, at) => at).filter((at) => values[at] !== null);
  part.dir = "auto"; part.tabIndex = 0;
  tokens.texts.forEach((text, at) => {
    const read = values[at] === null, token = makeElement("span", read ? "token read" : values[at] < 0 ? "token below" : "token", text);
    token.style.setProperty("--share", `${Math.round(50 * Math.abs(values[at]) / most)}%`);
    token.title = read ? "read, not trained" : `${name} ${scoreNumber(values[at])}`;
    if (at >= tokens.counted) token.classList.add("masked");
    part.append(token);
  });
  order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  const largest = order.slice(0, 5).map((at) => `“${tokens.texts[at].trim()}” ${scoreNumber(values[at])}`).join(", ");
  const masked = tokens.texts.length - tokens.counted;
  const read = values.length - order.length, sampled = read ? `${order.length} of ${values.length} tokens were sampled; the environment's, in grey italics, were only read. ` : "";
  return [part, makeElement("p", "quiet", `${sampled}Largest ${name === "kl" ? "KL" : name}: ${largest}.${masked ? ` ${masked} tokens do not count.` : ""}`)];
};

// An episode, turn by turn: who speaks, the reward of a reply, what is said, and the calls.
const turnList = (turns) => {
  const list = makeElement("ol", "turns");
  for (const { role, name, texts, calls, reward } of turns) {
    const turn = makeElement("li", role === "assistant" ? "reply" : "");
    turn.append(makeElement("p", "quiet", `${role} ${name}`.trim() + (reward === null ? "" : ` · reward ${scoreNumber(reward)}`)),
      ...texts.filter((text) => text).map((text) => longText("text", text)), ...calls.map((text) => longText("text call", text)));
    list.append(turn);
  }
  return list;
};
const ENDS = { length: "cut off", turns: "out of turns", full: "out of room" };

class RolloutBrowser {
  static SHOWN = 30;
  constructor(root, empty) {
    this.root = root; this.empty = empty; this.rows = []; this.alarms = []; this.bin = this.group = null; this.shown = RolloutBrowser.SHOWN;
    const controls = makeElement("div", "controls");
    const pair = (...inputs) => { const box = makeElement("span", "pair"); inputs[0].parentElement.before(box); box.append(...inputs.map((input) => input.parentElement)); };
    const field = (text, tag, type) => {
      const label = makeElement("label", "", text), input = makeElement(tag);
      if (type) { input.type = type; input.autocomplete = "off"; }
      if (type === "number") input.inputMode = "decimal";
      label.append(input); controls.append(label);
      input.addEventListener("input", () => { if (input !== this.shade) this.bin = this.group = null; this.shown = RolloutBrowser.SHOWN; this.list(); });
      return input;
    };
    this.text = field("Text ", "input", "search");
    this.step = field("Step ", "input", "number");
    this.stage = field("Stage ", "select"); this.alarm = field("Alarm ", "select");
    this.low = field("Score from ", "input", "number"); this.high = field("to ", "input", "number");
    this.short = field("Characters from ", "input", "number"); this.long = field("to ", "input", "number");
    pair(this.low, this.high); pair(this.short, this.long);
    this.order = field("Order ", "select"); this.shade = field("Tokens ", "select");
    for (const [value, name] of [["", "plain"], ["kl", "shaded by KL"], ["value", "shaded by value"], ["advantage", "shaded by advantage"]]) this.shade.append(new Option(name, value));
    for (const [value, name] of [["new", "newest first"], ["old", "oldest first"], ["high", "highest score first"], ["low", "lowest score first"], ["long", "longest first"]]) {
      this.order.append(new Option(name, value));
    }
    for (const input of [this.low, this.high]) input.step = "any";
    const clear = makeElement("button", "", "Show all");
    clear.type = "button"; clear.addEventListener("click", () => this.clear());
    controls.append(clear);
    this.scores = makeElement("figure"); this.bars = makeElement("div", "bars");
    this.scores.append(makeElement("h3", "", "Scores of these rollouts"), this.bars);
    this.count = makeElement("p", "quiet"); this.count.setAttribute("role", "status");
    this.cards = makeElement("div", "rollouts");
    this.more = makeElement("button", "", "Show more");
    this.more.type = "button"; this.more.addEventListener("click", () => {
      const first = this.cards.children.length;
      this.shown += RolloutBrowser.SHOWN; this.list(); focusOn(this.cards.children[first]);
    });
    root.replaceChildren(controls, this.scores, this.count, this.cards, this.more);
    this.set([], []);
  }
  set(rows, alarms) {
    this.rows = rows; this.alarms = alarms;
    this.fill(this.stage, "all", [...new Set(rows.map((row) => row.stage))]);
    this.shade.parentElement.hidden = !rows.some((row) => row.tokens);
    this.fill(this.alarm, "any step", [...new Set(alarms.map((one) => one.detector))]);
    this.list();
  }
  fill(select, all, names) {
    const before = select.value;
    if ([...select.options].slice(1).map((option) => option.value).join("\n") !== names.map((name) => `=${name}`).join("\n")) {
      select.replaceChildren(new Option(all, ""), ...names.map((name) => new Option(String(name).replaceAll("_", " ") || "this run", `=${name}`)));
      select.value = [...select.options].some((option) => option.value === before) ? before : "";
    }
    select.parentElement.hidden = names.length < (select === this.stage ? 2 : 1);
  }
  clear() {
    for (const input of [this.text, this.step, this.low, this.high, this.short, this.long, this.stage, this.alarm]) input.value = "";
    this.bin = this.group = null; this.shown = RolloutBrowser.SHOWN; this.list();
  }
  choose(step) {
    this.clear(); this.step.value = step; this.list();
    this.root.scrollIntoView({ block: "start" }); this.text.focus({ preventScroll: true });
  }
  fits() {
    const words = this.text.value.trim().toLowerCase(), step = this.step.value, stage = this.stage.value, alarm = this.alarm.value;
    const marked = new Set(this.alarms.filter((one) => `=${one.detector}` === alarm).map((one) => `${one.stage}\n${one.step}`));
    const within = (value, low, high) => (low.value === "" || value >= Number(low.value)) && (high.value === "" || value <= Number(high.value));
    const scored = this.low.value !== "" || this.high.value !== "";
    return this.rows.filter((row) => (step === "" || row.step === Number(step)) && (!stage || `=${row.stage}` === stage) &&
      (!alarm || marked.has(`${row.stage}\n${row.step}`)) && (!scored || (Number.isFinite(row.proxy) && within(row.proxy, this.low, this.high))) &&
      within((row.response || "").length, this.short, this.long) &&
      (!this.group || (row.step === this.group.step && row.prompt === this.group.prompt && row.stage === this.group.stage)) &&
      (!words || `${row.prompt}\n${row.response}`.toLowerCase().includes(words)));
  }
  list() {
    let rows = this.fits();
    this.histogram(rows);
    const [low, high, last] = this.bin || [];
    if (this.bin) rows = rows.filter((row) => Number.isFinite(row.proxy) && row.proxy >= low && (last || row.proxy < high));
    const order = this.order.value, by = { old: (a, b) => a.step - b.step, high: (a, b) => b.proxy - a.proxy, low: (a, b) => a.proxy - b.proxy,
      long: (a, b) => (b.response || "").length - (a.response || "").length, new: (a, b) => b.step - a.step }[order];
    if (order === "high" || order === "low") rows = rows.filter((row) => Number.isFinite(row.proxy));
    rows = [...rows].sort(by);
    if (this.shade.value && !this.group) rows = rows.filter((row) => row.tokens && row.tokens[this.shade.value]);
    const cut = rows.filter((row) => row.stop === "length").length;
    const text = this.group ? `The ${rows.length} answers to one prompt at step ${this.group.step}, side by side` :
      rows.length ? `${shortNumber(rows.length)} ${rows.length === 1 ? "rollout" : "rollouts"}${cut ? `, ${shortNumber(cut)} cut off at the token limit` : ""}` : this.rows.length ? "No rollout fits." : this.empty;
    if (this.count.textContent !== text) this.count.textContent = text;
    this.cards.className = this.group ? "rollouts sides" : "rollouts";
    this.cards.replaceChildren(...rows.slice(0, this.shown).map((row) => this.card(row)));
    this.more.hidden = rows.length <= this.shown;
  }
  histogram(rows) {
    const scores = rows.map((row) => row.proxy).filter(Number.isFinite);
    this.scores.hidden = !scores.length;
    if (!scores.length) return;
    let [low, high] = [Infinity, -Infinity];
    for (const score of scores) { if (score < low) low = score; if (score > high) high = score; }
    const count = high > low ? 16 : 1, width = (high - low) / count || 1, bins = new Array(count).fill(0);
    for (const score of scores) bins[Math.min(count - 1, Math.floor((score - low) / width))]++;
    const most = Math.max(...bins), focused = [...this.bars.children].indexOf(document.activeElement);
    this.bars.replaceChildren(...bins.map((number, place) => {
      const from = low + place * width, button = makeElement("button"), last = place === count - 1, on = this.bin !== null && this.bin[0] === from;
      button.type = "button"; button.disabled = !number; button.style.height = `${number / most * 100}%`;
      button.title = `${scoreNumber(from)} to ${scoreNumber(last ? high : from + width)}: ${number}`;
      button.setAttribute("aria-label", `scores from ${button.title} ${number === 1 ? "rollout" : "rollouts"}`);
      button.setAttribute("aria-pressed", on ? "true" : "false");
      button.addEventListener("click", () => { this.bin = on ? null : [from, from + width, last]; this.list(); });
      return button;
    }));
    if (focused >= 0 && focused < count) this.bars.children[focused].focus({ preventScroll: true });
  }
  card(row) {
    const box = makeElement("article", "answer"), head = makeElement("header"), answer = row.response ?? row.chosen ?? "", turns = row.turns || [];
    const replies = turns.filter((turn) => turn.role === "assistant").length, end = ENDS[row.stop] || (replies ? "ended" : "");
    const place = this.stage.options.length > 2 ? ` · ${row.stage}` : "";
    head.append(makeElement("span", "", `step ${shortNumber(row.step)}${place}${end && ` · ${end}`}${replies ? ` after ${replies} ${replies === 1 ? "reply" : "replies"}` : ""}`), makeElement("span", "", `score ${scoreNumber(row.proxy)}`));
    box.append(head);
    for (const [text, className] of [[row.prompt, "text prompt"], [answer, "text"]]) {
      if (!text && className !== "text") continue;
      if (className === "text" && this.shade.value && row.tokens && row.tokens[this.shade.value]) { box.append(...shadedTokens(row.tokens, this.shade.value)); continue; }
      box.append(className === "text" && turns.length ? turnList(turns) : longText(className, text));
    }
    if (row.reason) box.append(makeElement("p", "quiet", `No score: ${row.reason}`));
    const group = this.group ? [] : this.rows.filter((one) => one.step === row.step && one.prompt === row.prompt && one.stage === row.stage);
    if (group.length > 1) {
      const button = makeElement("button", "", `The ${group.length} answers to this prompt`);
      button.type = "button"; button.addEventListener("click", () => { this.clear(); this.group = row; this.list(); this.root.scrollIntoView(); focusOn(this.cards.firstChild); });
      box.append(button);
    }
    return box;
  }
}
