"use strict";
// Line charts on a canvas: every series keeps its points, and a redraw costs a pass over them.
const PALETTE = ["#1f86cb", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const colour = (place) => place < PALETTE.length ? PALETTE[place] : `hsl(${(place * 137.5) % 360} 62% 50%)`;
const MOST_POINTS = 8000;

class Points {
  constructor() { this.x = []; this.y = []; }
  add(x, y) {
    for (let i = 0; i < x.length; i++) { this.x.push(x[i]); this.y.push(y[i]); }
    while (this.x.length > MOST_POINTS) this.thin();
  }
  // every second point of the older half goes, as on the server
  thin() {
    const half = Math.floor(this.x.length / 2);
    for (const name of ["x", "y"]) {
      this[name] = this[name].filter((_, i) => i >= half || i % 2 === 0);
    }
  }
  get last() { return this.y[this.y.length - 1]; }
}

const ticks = (low, high, count, least = 0) => {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = Math.max(least, [1, 2, 5, 10].find((factor) => factor * power >= rough) * power);
  const values = [];
  for (let i = Math.ceil(low / unit); i * unit <= high + unit * 1e-9 && i + 1 > i; i++) values.push(Number((i * unit).toPrecision(12)));
  return values;
};
// the ticks of an axis, all with as many digits behind the point
const tickTexts = (values) => {
  const places = Math.max(0, ...values.map((value) => (String(value).split(".")[1] || "").length));
  return values.map((value) => places && places < 7 ? minus(value.toFixed(places)) : shortNumber(value));
};

const bounds = (series) => {
  let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { points: { x, y } } of series) {
    for (let i = 0; i < x.length; i++) {
      if (x[i] < left) left = x[i];
      if (x[i] > right) right = x[i];
      if (y[i] < low) low = y[i];
      if (y[i] > high) high = y[i];
    }
  }
  if (left > right) return null;
  if (left === right) { left -= 1; right += 1; }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  const room = (high - low) / 20;
  return { left, right, low: low - room, high: high + room };
};

class LineChart {
  constructor(canvas, options = {}) {
    this.canvas = canvas; this.options = options; this.series = []; this.lit = null;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerdown", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { hoverText(null); if (this.lit) { this.lit = null; this.draw(); } });
    if (options.choose) canvas.addEventListener("click", (event) => { const hit = this.nearest(event); if (hit) options.choose(hit.step); });
  }
  set(series) { this.series = series; this.draw(); }
  draw() {
    const { canvas, options } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const range = bounds(this.series);
    if (!range) { this.area = null; return; }
    this.area = options.bare ? { x: 1, y: 2, width: width - 2, height: height - 4 } : { x: 52, y: 6, width: width - 68, height: height - 28 };
    this.range = range;
    if (!options.bare) this.axes(pen, width, height);
    for (const one of this.series) if (one !== this.lit) this.line(pen, one, this.lit ? 0.25 : 1);
    if (this.lit) this.line(pen, this.lit, 1, 2.4);
  }
  at(step, value) {
    const { area, range } = this;
    return [area.x + (step - range.left) / (range.right - range.left) * area.width,
      area.y + area.height - (value - range.low) / (range.high - range.low) * area.height];
  }
  axes(pen, width, height) {
    const { area, range } = this, style = getComputedStyle(document.documentElement);
    pen.strokeStyle = style.getPropertyValue("--grid"); pen.fillStyle = style.getPropertyValue("--muted");
    pen.lineWidth = 1; pen.font = "11px system-ui, sans-serif"; pen.beginPath();
    pen.textAlign = "right"; pen.textBaseline = "middle";
    const heights = ticks(range.low, range.high, area.height / 32), texts = tickTexts(heights);
    for (const [place, value] of heights.entries()) {
      const y = Math.round(this.at(range.left, value)[1]) + 0.5;
      pen.moveTo(area.x, y); pen.lineTo(area.x + area.width, y);
      pen.fillText(texts[place], area.x - 6, y);
    }
    pen.textAlign = "center"; pen.textBaseline = "top";
    for (const value of ticks(range.left, range.right, Math.min(8, area.width / 70), 1)) {
      const x = Math.round(this.at(value, range.low)[0]) + 0.5;
      pen.moveTo(x, area.y); pen.lineTo(x, area.y + area.height);
      const text = shortNumber(value);
      pen.fillText(text, Math.min(x, width - pen.measureText(text).width / 2), area.y + area.height + 6);
    }
    pen.stroke();
  }
  // more points than columns: of each column the lowest and the highest value are drawn
  line(pen, one, alpha, thick = 1.5) {
    const { x, y } = one.points;
    if (!x.length) return;
    pen.globalAlpha = alpha; pen.strokeStyle = one.colour; pen.lineWidth = thick; pen.lineJoin = "round"; pen.beginPath();
    const dense = x.length > 2 * this.area.width;
    let column = -1, low = 0, high = 0;
    for (let i = 0; i < x.length; i++) {
      const [px, py] = this.at(x[i], y[i]);
      if (!dense) { if (i) pen.lineTo(px, py); else pen.moveTo(px, py); continue; }
      if (Math.floor(px) === column) { if (py < low) low = py; if (py > high) high = py; continue; }
      if (column >= 0) { pen.lineTo(column, low); pen.lineTo(column, high); }
      column = Math.floor(px); low = high = py;
    }
    if (dense) { pen.lineTo(column, low); pen.lineTo(column, high); }
    pen.stroke();
    if (x.length === 1) { pen.fillStyle = one.colour; pen.fillRect(...this.at(x[0], y[0]).map((p) => p - 2), 4, 4); }
    pen.globalAlpha = 1;
  }
  nearest(event) {
    if (!this.area) return null;
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const step = this.range.left + (px - this.area.x) / this.area.width * (this.range.right - this.range.left);
    let best = null;
    for (const one of this.series) {
      const { x, y } = one.points;
      if (!x.length) continue;
      let [low, high] = [0, x.length - 1];
      while (low < high) { const middle = (low + high) >> 1; if (x[middle] < step) low = middle + 1; else high = middle; }
      const place = low && Math.abs(x[low - 1] - step) <= Math.abs(x[low] - step) ? low - 1 : low;
      const [qx, qy] = this.at(x[place], y[place]);
      const distance = Math.hypot((qx - px) * 0.5, qy - py);
      if (!best || distance < best.distance) best = { one, distance, step: x[place], value: y[place] };
    }
    return best;
  }
  hover(event) {
    const hit = this.nearest(event);
    if (!hit) return;
    hoverText(event, `${hit.one.name}\nstep ${shortNumber(hit.step)}: ${shortNumber(hit.value)}`);
    if (this.series.length > 1 && this.lit !== hit.one) { this.lit = hit.one; this.draw(); }
  }
}

const hoverText = (event, text) => {
  const hover = document.getElementById("hover");
  hover.hidden = !event;
  if (!event) return;
  hover.textContent = text;
  const room = document.documentElement.clientWidth - hover.offsetWidth - 8;
  hover.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
  hover.style.top = `${Math.max(8, event.clientY - hover.offsetHeight - 12)}px`;
};
