"use strict";
(() => {
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const MAIN = ["reward/proxy", "gold/score", "heldout/score", "heldout/correct", "kl/policy_reference_k1", "response/length",
    "response/stop_rate", "policy/entropy", "loss", "eval_loss", "accuracy", "eval_accuracy"];
  const MOST_ROLLOUTS = 500;
  // maps, since a metric may be called like a property of every object
  const [means, evaluated] = JSON.parse($("words").content.textContent).map((table) => new Map(Object.entries(table)));
  const charts = new Set();
  const redraw = () => { for (const chart of charts) chart.draw(); };

  $("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (system.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  system.addEventListener("change", redraw);
  addEventListener("scroll", () => hoverText(null), { passive: true });

  const make = makeElement;
  // a text node changes only where its text does, so that a screen reader is not spoken to each second
  const write = (element, text) => { if (element.textContent !== text) element.textContent = text; };
  const clock = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  };
  const ago = (moment) => {
    if (!moment) return "–";
    const seconds = Math.max(0, Date.now() / 1000 - moment);
    if (seconds < 90) return `${Math.round(seconds)} s ago`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
  };
  const steps = (run) => run.step ? `${shortNumber(run.step)} of ${run.steps ? shortNumber(run.steps) : "?"}` : "–";
  const figure = (key, choose) => {
    const box = make("figure"), heading = make("h3", "", evaluated.get(key) || key), value = make("b"), holder = make("div", "canvas"), canvas = make("canvas");
    canvas.setAttribute("role", "img");
    heading.append(value); holder.append(canvas); box.append(heading, holder);
    if (means.has(key)) box.append(make("figcaption", "", means.get(key)));
    const chart = new LineChart(canvas, { choose });
    charts.add(chart);
    return { box, value, chart, canvas };
  };
  const inWords = (name, points) => {
    const count = points.x.length;
    if (!count) return `${name}: no points yet`;
    let [low, high] = [Infinity, -Infinity];
    for (const value of points.y) { if (value < low) low = value; if (value > high) high = value; }
    return `${name}: ${shortNumber(points.y[0])} at step ${points.x[0]}, ${shortNumber(points.last)} at step ${points.x[count - 1]}, ` +
      `between ${shortNumber(low)} and ${shortNumber(high)}`;
  };

  const overview = () => {
    // for each metric its cursor and curves: a metric that is chosen again goes on from there
    const metrics = new Map(), rows = new Map(), runs = new Map();
    const chart = new LineChart(document.querySelector("#chart canvas"));
    charts.add(chart);
    let source = null, current = "", places = 0;
    const select = $("metric");
    for (const key of MAIN) select.append(new Option(key, key));
    const chosen = new URLSearchParams(location.search).get("metric");
    select.value = MAIN.includes(chosen) ? chosen : MAIN[0];

    const row = (id) => {
      const line = make("tr"), cells = ["", "", "step", "left", "value", "", "alarms", "last"].map((name) => {
        const cell = make("td");
        if (name) cell.dataset.name = name;
        line.append(cell);
        return cell;
      });
      const link = make("a"), swatch = make("span", "swatch"), state = make("span", "state"), holder = make("div"), canvas = make("canvas");
      link.href = `/run/${id}`;
      canvas.setAttribute("aria-hidden", "true");
      holder.append(canvas); cells[5].className = "curve"; cells[5].append(holder);
      cells[0].append(swatch, link); cells[1].append(state);
      const small = new LineChart(canvas, { bare: true });
      const made = { line, cells, link, swatch, state, small, place: places++ };
      swatch.style.background = colour(made.place);
      const light = (on) => { chart.lit = on ? chart.series.find((one) => one.id === id) || null : null; chart.draw(); line.classList.toggle("lit", on); };
      line.addEventListener("pointerenter", () => light(true)); line.addEventListener("pointerleave", () => light(false));
      link.addEventListener("focus", () => light(true)); link.addEventListener("blur", () => light(false));
      rows.set(id, made);
      return made;
    };
    const curveOf = (id) => {
      const stages = metrics.get(current).curves.get(id);
      return stages ? [...stages.values()].reduce((a, b) => (b.points.x.length && b.tick >= a.tick ? b : a)) : null;
    };
    const show = () => {
      const began = performance.now(), wanted = $("filter").value.trim().toLowerCase(), series = [];
      const order = [...runs.entries()].sort(([, a], [, b]) => (b.condition === "running") - (a.condition === "running") || b.newest - a.newest);
      const body = $("runs"), counts = new Map();
      order.forEach(([id, run], place) => {
        const made = rows.get(id) || row(id), curve = curveOf(id);
        const visible = !wanted || run.name.toLowerCase().includes(wanted);
        counts.set(run.condition, (counts.get(run.condition) || 0) + 1);
        if (made.line.hidden === visible) made.line.hidden = !visible;
        write(made.link, run.name); write(made.state, run.condition);
        if (made.state.className !== `state ${run.condition}`) made.state.className = `state ${run.condition}`;
        const texts = [null, null, steps(run) + (run.stage && run.stage !== run.name ? ` ${run.stage}` : ""), clock(run.left),
          shortNumber(curve ? curve.points.last : null), null, run.alarms ? String(run.alarms) : "–", ago(run.newest)];
        texts.forEach((text, i) => { if (text !== null) write(made.cells[i], text); });
        if (body.children[place] !== made.line) body.insertBefore(made.line, body.children[place] || null);
        if (curve && visible) {
          series.push({ id, name: run.name, colour: colour(made.place), points: curve.points });
          if (curve.drawn !== curve.tick) { made.small.set([series[series.length - 1]]); curve.drawn = curve.tick; }
        }
      });
      const words = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
      write($("counts"), runs.size ? `${runs.size} ${runs.size === 1 ? "run" : "runs"}: ${words}` : "There are no runs in this folder yet.");
      write(document.querySelector("#chart h2"), series.length ? `${current} over steps` : `No run has ${current} yet.`);
      write($("value"), current);
      write(document.querySelector("#chart figcaption"), means.get(current) || "");
      chart.lit = chart.lit && series.find((one) => one.id === chart.lit.id) || null;
      chart.set(series);
      chart.canvas.setAttribute("aria-label", `${current} of ${series.length} runs over steps; the table below has their last values`);
      // what tests and benchmarks read
      document.body.dataset.took = performance.now() - began;
      document.body.dataset.points = series.reduce((sum, one) => sum + one.points.x.length, 0);
    };
    const take = (event) => {
      const held = metrics.get(current), news = JSON.parse(event.data);
      held.since = event.lastEventId;
      for (const [id, run] of Object.entries(news.runs || {})) {
        runs.set(id, run);
        const stages = held.curves.get(id) || new Map();
        for (const { stage, anew, x, y } of run.curves) {
          if (anew || !stages.has(stage)) stages.set(stage, { points: new Points(), tick: 0 });
          const one = stages.get(stage);
          one.points.add(x, y); one.tick = Math.max(...[...stages.values()].map((other) => other.tick)) + 1;
        }
        if (stages.size) held.curves.set(id, stages);
        delete run.curves;
      }
      const present = new Set(news.ids);
      for (const id of runs.keys()) {
        if (!present.has(id)) {
          runs.delete(id);
          for (const one of metrics.values()) one.curves.delete(id);
          if (rows.has(id)) { rows.get(id).line.remove(); rows.delete(id); }
        }
      }
      write($("note"), news.note);
      show();
    };
    const follow = () => {
      if (source) source.close();
      current = select.value;
      if (!metrics.has(current)) metrics.set(current, { since: "", curves: new Map() });
      for (const stages of metrics.get(current).curves.values()) for (const one of stages.values()) one.drawn = -1;
      for (const made of rows.values()) made.small.set([]);
      source = new EventSource(`/stream?metric=${encodeURIComponent(current)}&since=${metrics.get(current).since}`);
      source.onmessage = take;
      source.onerror = () => write($("note"), "The dashboard does not answer. The runs go on; this page tries again.");
      if (runs.size) show();
    };
    select.addEventListener("change", follow);
    $("filter").addEventListener("input", show);
    setInterval(() => { for (const [id, made] of rows) write(made.cells[7], ago((runs.get(id) || {}).newest)); }, 5000);
    follow();
  };

  const runPage = () => {
    const id = location.pathname.split("/").pop(), stages = new Map(), figures = new Map();
    let rollouts = [], alarms = [], run = null, following = true;
    const browser = new RolloutBrowser($("rollouts"), "No rollouts were recorded yet.");
    const choose = (step) => browser.choose(step);
    const ask = async (button) => {
      button.disabled = true;
      const body = new URLSearchParams({ token: document.querySelector('meta[name="token"]').content });
      try {
        const response = await fetch(`/run/${id}/${button.dataset.request}`, { method: "POST", body });
        const answer = await response.json();
        const means = button.dataset.request === "stop" ? "The run stops and saves after the step in hand." : "A checkpoint is saved after the step in hand.";
        write($("answer"), answer.error || means);
      } catch (error) { write($("answer"), "The dashboard does not answer, so nothing was asked."); }
      setTimeout(() => { button.disabled = false; }, 2000);
    };
    for (const button of document.querySelectorAll("[data-request]")) button.addEventListener("click", () => ask(button));

    const draw = () => {
      const name = $("stage").value, curves = stages.get(name) || new Map();
      for (const [key, made] of figures) if (!curves.has(key)) { charts.delete(made.chart); made.box.remove(); figures.delete(key); }
      $("evaluated").hidden = ![...curves.keys()].some((key) => evaluated.has(key));
      for (const [key, points] of [...curves].sort(([a], [b]) => (MAIN.indexOf(a) + 1 || 99) - (MAIN.indexOf(b) + 1 || 99) || a.localeCompare(b))) {
        let made = figures.get(key);
        if (!made) {
          made = figure(key, choose);
          figures.set(key, made);
          (MAIN.includes(key) ? $("main") : evaluated.has(key) ? $("evaluated").lastElementChild : $("more")).append(made.box);
        }
        write(made.value, shortNumber(points.last));
        made.canvas.setAttribute("aria-label", inWords(evaluated.get(key) || key, points));
        if (MAIN.includes(key) || evaluated.has(key) || $("others").open) made.chart.set([{ name: key, colour: PALETTE[0], points }]);
      }
    };
    const status = () => {
      const left = run.left === null ? "" : ` · ${clock(run.left)} left`;
      write($("name"), run.name); document.title = `${run.name} · ${run.condition} · tether`;
      $("state").className = `quiet state ${run.condition}`;
      write($("state"), `${run.condition} · ${run.stage || "no stage"} · step ${steps(run)}${left} · ${run.means}`);
      $("done").style.width = run.steps ? `${Math.min(100, 100 * run.step / run.steps)}%` : "0";
      $("requests").hidden = run.condition !== "running";
      write($("report"), `tether report ${run.name}`);
      $("notes").replaceChildren(...run.notes.map((note) => make("p", "note", note)));
    };
    const alarmCard = (row) => {
      const box = make("article", "answer alarm"), head = make("header");
      head.append(make("b", "", String(row.detector || "").replaceAll("_", " ")), make("span", "", `step ${shortNumber(row.step)}`));
      box.append(head, make("p", "", row.message || ""), make("p", "quiet", row.advice || ""));
      return box;
    };
    const source = new EventSource(`/stream/${id}`);
    source.onmessage = (event) => {
      const began = performance.now();
      run = JSON.parse(event.data);
      for (const { stage, key, anew, x, y } of run.curves) {
        if (!stages.has(stage)) stages.set(stage, new Map());
        const curves = stages.get(stage);
        if (anew || !curves.has(key)) curves.set(key, new Points());
        curves.get(key).add(x, y);
      }
      for (const name of run.reset) {
        rollouts = rollouts.filter((row) => row.stage !== name);
        alarms = alarms.filter((row) => row.stage !== name);
      }
      if (run.rollouts.length || run.reset.length) rollouts = rollouts.concat(run.rollouts).slice(-MOST_ROLLOUTS);
      if (run.alarm_rows.length || run.reset.length) {
        alarms = alarms.concat(run.alarm_rows).slice(-100);
        $("alarms").replaceChildren(...(alarms.length ? [...alarms].reverse().map(alarmCard) : [make("p", "quiet", "None so far.")]));
      }
      if (run.rollouts.length || run.alarm_rows.length || run.reset.length) browser.set(rollouts, alarms);
      const select = $("stage"), names = [...stages.keys()];
      if (select.options.length !== names.length) {
        const before = select.value;
        select.replaceChildren(...names.map((name) => new Option(name || run.name, name)));
        select.value = names.includes(before) && !following ? before : names[names.length - 1];
      }
      if (following) { const live = names.find((name) => (name || run.name) === run.stage) ?? select.value; if (live !== select.value) select.value = live; }
      select.closest("p").hidden = names.length < 2;
      status(); draw();
      document.body.dataset.took = performance.now() - began;
      document.body.dataset.points = [...stages.values()].reduce((sum, curves) => sum + [...curves.values()].reduce((n, p) => n + p.x.length, 0), 0);
    };
    source.addEventListener("gone", (event) => { source.close(); write($("state"), JSON.parse(event.data)); $("state").className = "quiet"; $("requests").hidden = true; });
    source.onerror = () => {
      if (source.readyState === EventSource.CLOSED && !run) write($("state"), "There is no such run: it may have been deleted or moved.");
    };
    $("stage").addEventListener("change", () => { following = false; draw(); });
    $("others").addEventListener("toggle", draw);
  };

  if (document.body.dataset.page === "overview") overview(); else runPage();
})();
