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

// How the charts of a page are drawn: the weight of smoothing, and which axes are logarithmic.
const view = { smooth: 0, logX: false, logY: false };
const PLAIN = { smooth: 0, logX: false, logY: false };
// of a logarithmic axis the powers of ten, with their multiples of two and five where there is room; within one power even steps
const logTicks = (low, high, count, least) => {
  const between = (factors) => {
    const values = [];
    for (let power = Math.floor(low); power <= high; power++) for (const factor of factors) values.push(Number((factor * 10 ** power).toPrecision(1)));
    return values.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
  };
  const powers = between([1]), more = between([1, 2, 5]);
  if (more.length < 3) return ticks(10 ** low, 10 ** high, count, least).filter((value) => value > 0);
  const every = Math.ceil(powers.length / Math.max(1, count));
  return more.length <= 1.5 * count ? more : powers.filter((_, place) => place % every === 0);
};

// The ends of the axes, on their scales; what a logarithmic axis cannot show is left out, and counted.
const bounds = (series, how = PLAIN) => {
  const alongX = how.logX ? Math.log10 : (value) => value, alongY = how.logY ? Math.log10 : (value) => value;
  let [left, right, low, high, out] = [Infinity, -Infinity, Infinity, -Infinity, 0];
  const take = (x, y) => {
    for (let i = 0; i < x.length; i++) {
      const a = alongX(x[i]), b = alongY(y[i]);
      if (!Number.isFinite(a) || !Number.isFinite(b)) { out += Number.isFinite(y[i]); continue; }
      if (a < left) left = a;
      if (a > right) right = a;
      if (b < low) low = b;
      if (b > high) high = b;
    }
  };
  for (const { points, raw, band } of series) {
    take(points.x, points.y);
    const counted = out;
    if (raw) take(raw.x, raw.y);
    if (band) { take(band.x, band.low); take(band.x, band.high); }
    out = counted;
  }
  if (left > right) return null;
  if (left === right) { left -= 1; right += 1; }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  const room = (high - low) / 20;
  return { left, right, low: low - room, high: high + room, out, alongX, alongY };
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
    const range = bounds(this.series, options.bare ? PLAIN : view);
    if (!range) { this.area = null; return; }
    this.area = options.bare ? { x: 1, y: 2, width: width - 2, height: height - 4 } : { x: 52, y: 6, width: width - 68, height: height - 28 };
    this.range = range;
    if (!options.bare) this.axes(pen, width, height);
    pen.save(); pen.beginPath(); pen.rect(this.area.x, 0, this.area.width + 2, this.area.y + this.area.height + 2); pen.clip();
    const faint = (one) => this.lit && one !== this.lit ? 0.3 : 1;
    for (const one of this.series) if (one.band) this.band(pen, one, 0.2 * faint(one));
    for (const one of this.series) if (one.raw) this.line(pen, { ...one, points: one.raw }, 0.25 * faint(one), 1);
    for (const one of this.series) if (one !== this.lit) this.line(pen, one, this.lit ? 0.25 : 1);
    if (this.lit) this.line(pen, this.lit, 1, 2.4);
    pen.restore();
  }
  at(step, value) {
    const { area, range } = this;
    return [area.x + (range.alongX(step) - range.left) / (range.right - range.left) * area.width,
      area.y + area.height - (range.alongY(value) - range.low) / (range.high - range.low) * area.height];
  }
  axes(pen, width, height) {
    const { area, range } = this, style = getComputedStyle(document.documentElement);
    pen.strokeStyle = style.getPropertyValue("--grid"); pen.fillStyle = style.getPropertyValue("--muted");
    pen.lineWidth = 1; pen.font = "11px system-ui, sans-serif"; pen.beginPath();
    pen.textAlign = "right"; pen.textBaseline = "middle";
    const heights = view.logY ? logTicks(range.low, range.high, area.height / 32, 0) : ticks(range.low, range.high, area.height / 32);
    const texts = view.logY ? heights.map(shortNumber) : tickTexts(heights);
    const [firstStep, firstValue] = [view.logX ? 10 ** range.left : range.left, view.logY ? 10 ** range.low : range.low];
    for (const [place, value] of heights.entries()) {
      const y = Math.round(this.at(firstStep, value)[1]) + 0.5;
      pen.moveTo(area.x, y); pen.lineTo(area.x + area.width, y);
      pen.fillText(texts[place], area.x - 6, y);
    }
    pen.textAlign = "center"; pen.textBaseline = "top";
    const places = Math.min(8, area.width / 70);
    for (const value of view.logX ? logTicks(range.left, range.right, places, 1) : ticks(range.left, range.right, places, 1)) {
      const x = Math.round(this.at(value, firstValue)[0]) + 0.5;
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
    let column = -1, low = 0, high = 0, begun = false;
    for (let i = 0; i < x.length; i++) {
      const [px, py] = this.at(x[i], y[i]);
      if (!Number.isFinite(px + py)) { begun = false; continue; }
      if (!dense) { if (begun) pen.lineTo(px, py); else pen.moveTo(px, py); begun = true; continue; }
      if (Math.floor(px) === column) { if (py < low) low = py; if (py > high) high = py; continue; }
      if (column >= 0) { pen.lineTo(column, low); pen.lineTo(column, high); }
      column = Math.floor(px); low = high = py;
    }
    if (dense) { pen.lineTo(column, low); pen.lineTo(column, high); }
    pen.stroke();
    if (x.length === 1) { pen.fillStyle = one.colour; pen.fillRect(...this.at(x[0], y[0]).map((p) => p - 2), 4, 4); }
    pen.globalAlpha = 1;
  }
  // the interval around a mean, in parts where it is not known throughout, or below a logarithmic axis
  band(pen, one, alpha) {
    const { x, low, high } = one.band, floor = this.area.y + this.area.height;
    pen.globalAlpha = alpha; pen.fillStyle = one.colour;
    for (let i = 0; i < x.length; i++) {
      const begin = i;
      while (i < x.length && Number.isFinite(this.range.alongY(high[i]))) i++;
      if (i === begin) continue;
      pen.beginPath();
      for (let at = begin; at < i; at++) pen.lineTo(...this.at(x[at], high[at]));
      for (let at = i - 1; at >= begin; at--) { const [px, py] = this.at(x[at], low[at]); pen.lineTo(px, Number.isFinite(py) ? py : floor); }
      pen.fill();
    }
    pen.globalAlpha = 1;
  }
  nearest(event) {
    if (!this.area) return null;
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const along = this.range.left + (px - this.area.x) / this.area.width * (this.range.right - this.range.left);
    const step = view.logX ? 10 ** along : along;
    let best = null;
    for (const one of this.series) {
      const { x, y } = one.points;
      if (!x.length) continue;
      let [low, high] = [0, x.length - 1];
      while (low < high) { const middle = (low + high) >> 1; if (x[middle] < step) low = middle + 1; else high = middle; }
      const place = low && Math.abs(x[low - 1] - step) <= Math.abs(x[low] - step) ? low - 1 : low;
      const [qx, qy] = this.at(x[place], y[place]);
      const distance = Math.hypot((qx - px) * 0.5, qy - py);
      if (Number.isFinite(distance) && (!best || distance < best.distance)) best = { one, distance, place, step: x[place], value: y[place] };
    }
    return best;
  }
  hover(event) {
    const hit = this.nearest(event);
    if (!hit) return;
    const { band, raw } = hit.one, ends = band && Number.isFinite(band.low[hit.place]) ? ` [${shortNumber(band.low[hit.place])}, ${shortNumber(band.high[hit.place])}]` : "";
    hoverText(event, `${hit.one.name}\nstep ${shortNumber(hit.step)}: ${shortNumber(hit.value)}${ends}${raw ? ", smoothed" : ""}`);
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
