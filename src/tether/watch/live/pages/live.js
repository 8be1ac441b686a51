"use strict";
(() => {
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const system = matchMedia("(prefers-color-scheme: dark)");
  const MAIN = ["reward/proxy", "gold/score", "heldout/score", "heldout/correct", "kl/policy_reference_k1", "response/length",
    "response/stop_rate", "policy/entropy", "loss", "eval_loss", "accuracy", "eval_accuracy"];
  const MOST_ROLLOUTS = 500, FIRST_COLUMNS = 5;
  // verdicts whose word alone does not say of what
  const SHORT = { higher: "score rose", lower: "score fell" };
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

  // what is chosen on a page stands in its address, which can be handed on
  const address = new URLSearchParams(location.search);
  const keep = (name, value) => {
    if (value) address.set(name, value); else address.delete(name);
    history.replaceState(null, "", address.size ? `?${address}` : location.pathname);
  };
  const chosenView = (changed) => {
    const take = () => {
      view.smooth = Number($("smooth").value); view.logX = $("log-x").checked; view.logY = $("log-y").checked;
      write($("smooth-value"), view.smooth ? view.smooth.toFixed(2) : "off");
      keep("smooth", view.smooth || ""); keep("x", view.logX ? "log" : ""); keep("y", view.logY ? "log" : "");
    };
    $("smooth").value = address.get("smooth") || 0; $("log-x").checked = address.get("x") === "log"; $("log-y").checked = address.get("y") === "log";
    for (const name of ["smooth", "log-x", "log-y"]) $(name).addEventListener("input", () => { take(); changed(); });
    take();
  };
  const drawnAs = (one) => view.smooth ? { ...one, points: smoothed(one.points, view.smooth), raw: one.points } : one;
  const tagsOf = (said) => String(said.tags || "").split(",").map((tag) => tag.trim()).filter(Boolean);
  const reportOf = (id) => `/run/${id}/report.html`;

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
  const steps = (run) => run.step ? shortNumber(run.step) + (run.steps ? ` of ${shortNumber(run.steps)}` : "") : "–";
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
    select.value = MAIN.includes(address.get("metric")) ? address.get("metric") : MAIN[0];
    $("filter").value = address.get("runs") || "";
    $("together").checked = address.has("together");
    let columns = [], shownColumns = [];
    const said = new Map();  // what there is to say of a run, its settings among it

    const groupRows = new Map();  // by what the runs of a row have in common
    const row = (id, own = rows) => {
      const line = make("tr"), cells = {};
      for (const name of ["run", "state", "step", "verdict", "win rate", "value", "curve", "alarms", "last"]) {
        cells[name] = make("td");
        if (!["run", "state", "curve"].includes(name)) cells[name].dataset.name = name;
        line.append(cells[name]);
      }
      const link = make("a"), swatch = make("span", "swatch"), state = make("span", "state"), holder = make("div"), canvas = make("canvas");
      const report = make("a"), tags = make("span", "tags"), note = make("span", "said"), rate = make("span"), ends = make("span", "interval");
      link.href = `/run/${id}`; report.href = reportOf(id);
      canvas.setAttribute("aria-hidden", "true");
      holder.append(canvas); cells.curve.className = "curve"; cells.curve.append(holder);
      cells.run.append(swatch, link, tags, note); cells.state.append(state); cells.verdict.append(report); cells["win rate"].append(rate, " ", ends);
      const small = new LineChart(canvas, { bare: true });
      const made = { line, cells, link, swatch, state, small, report, tags, note, rate, ends, settings: [], place: own === rows ? places++ : 0 };
      const light = (on) => { chart.lit = on ? chart.series.find((one) => one.ids.includes(made.first || id)) || null : null; chart.draw(); line.classList.toggle("lit", on); };
      line.addEventListener("pointerenter", () => light(true)); line.addEventListener("pointerleave", () => light(false));
      link.addEventListener("focus", () => light(true)); link.addEventListener("blur", () => light(false));
      own.set(id, made);
      return made;
    };
    // several runs as one row: how many, their links, and the means of what they have
    const groupRow = (key, ids) => {
      let made = groupRows.get(key);
      if (!made) {
        made = row(key, groupRows);
        made.name = make("b"); made.members = make("span", "said");
        made.link.replaceWith(made.name); made.note.replaceWith(made.members);
        made.words = make("span"); made.report.replaceWith(made.words);
      }
      made.first = ids[0];
      ids = [...ids].sort((a, b) => said.get(a).name.localeCompare(said.get(b).name, "en", { numeric: true }));
      const own = ids.map((id) => ({ id, ...said.get(id), run: runs.get(id), curve: curveOf(id) }));
      const each = (list) => [...list.reduce((all, text) => all.set(text, (all.get(text) || 0) + 1), new Map())];
      const counted = (list) => each(list).map(([text, count]) => `${count} ${text}`).join(", ");
      write(made.name, `${own[0].title}, ${ids.length} runs`);
      const seeds = own.map((one) => [...one.settings].filter(([name]) => isSeed(name)).map(([, text]) => text)[0]), seeded = new Set(seeds).size === ids.length && !seeds.includes(undefined);
      const labels = own.map((one, i) => seeded ? `seed ${seeds[i]}` : one.name), mark = JSON.stringify([ids, labels]);
      if (made.mark !== mark) {
        made.mark = mark;
        made.members.replaceChildren(...labels.flatMap((text, i) => {
          const link = make("a", "", text);
          link.href = `/run/${ids[i]}`; link.setAttribute("aria-label", own[i].name);
          return i ? [", ", link] : [link];
        }));
      }
      const states = each(own.map((one) => one.run.condition));
      write(made.state, states.length > 1 ? counted(own.map((one) => one.run.condition)) : states[0][0]);
      made.state.className = `state ${states.length > 1 ? "" : states[0][0]}`;
      const [least, most] = [Math.min, Math.max].map((of) => of(...own.map((one) => one.run.step || 0)));
      write(made.cells.step, least === most ? shortNumber(most) : `${shortNumber(least)} to ${shortNumber(most)}`);
      const verdicts = own.map((one) => one.verdict || {}).filter((one) => one.word);
      write(made.words, counted(verdicts.map((one) => SHORT[one.word] || one.word)) || "–");
      const rates = verdicts.map((one) => /^([\d.]+)%/.exec(one.rate || "")).filter(Boolean).map((match) => Number(match[1]));
      const { y, low, high } = meanOf(rates.map((rate) => ({ x: [0], y: [rate] }))), percent = (value) => `${Math.min(100, Math.max(0, value)).toFixed(1)}%`;
      write(made.rate, rates.length ? percent(y[0]) : "–");
      write(made.ends, high[0] > low[0] ? `[${percent(low[0])}, ${percent(high[0])}]` : rates.length ? "[too few]" : "");
      made.cells["win rate"].title = rates.length ? `The mean of ${rates.length} runs, with its 95% interval over seeds from 3 on` : "";
      const last = own.filter((one) => one.curve && one.curve.points.x.length).map((one) => one.curve.points.last);
      write(made.cells.value, shortNumber(last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : null));
      const alarms = own.reduce((sum, one) => sum + one.run.alarms, 0);
      write(made.cells.alarms, alarms ? String(alarms) : "–");
      made.newest = Math.max(...own.map((one) => one.run.newest || 0));
      write(made.cells.last, ago(made.newest));
      const texts = shownColumns.map((key) => each(own.map((one) => one.settings.get(key) ?? "–")).map(([text]) => text).join(", "));
      if (made.texts !== JSON.stringify([shownColumns, texts])) {
        made.texts = JSON.stringify([shownColumns, texts]);
        for (const cell of made.settings) cell.remove();
        made.settings = texts.map((text, i) => { const cell = make("td", "setting", text); cell.dataset.name = shownColumns[i]; made.cells.alarms.before(cell); return cell; });
      }
      return made;
    };
    const curveOf = (id) => {
      const stages = metrics.get(current).curves.get(id);
      return stages ? [...stages.values()].reduce((a, b) => (b.points.x.length && b.tick >= a.tick ? b : a)) : null;
    };
    // the whole of what is said of each run, where some of it is new
    const tell = () => {
      const tables = new Map([...said.values()].map((one) => [one.path, one.sweep]));
      for (const [id, one] of said) { one.combination = combinationOf(one.path, tables); one.ended = (runs.get(id) || {}).condition === "ended"; }
      const groups = groupsOf([...said.values()]);
      [...said.values()].forEach((one, place) => {
        const { combination } = one;
        one.group = groups[place];
        one.name = combination.length ? `${one.path.split("/sweep/")[0]} · ${combination.join(", ")}` : one.path;
        one.title = combination.length ? one.group : one.path;
      });
      columns = differing([...said.values()].map((one) => one.settings));
      const shown = shownColumns = $("every").checked ? columns : columns.slice(0, FIRST_COLUMNS);
      $("every").closest("label").hidden = columns.length <= FIRST_COLUMNS;
      write($("every-words"), `All ${columns.length} settings that differ`);
      for (const old of document.querySelectorAll(".runs th.setting")) old.remove();
      for (const key of shown) { const head = make("th", "setting", key.replaceAll(".", ".\u200b")); head.scope = "col"; $("alarms").before(head); }
      for (const [id, one] of said) {
        const made = rows.get(id), verdict = one.verdict || {};
        if (!made) continue;
        const name = one.name, headline = verdict.headline || "";
        write(made.link, name);
        const word = SHORT[verdict.word] || verdict.word || "report";
        write(made.report, word);
        made.report.className = `state ${verdict.word ? verdict.tone : "none"}`;
        made.report.title = headline;
        made.report.setAttribute("aria-label", `${word}: report of ${name}${headline ? `, ${headline}` : ""}`);
        const [, centre, bounds] = /^(.*?)( \[.*)?$/.exec(verdict.rate || "–");
        write(made.rate, centre); write(made.ends, (bounds || "").trim());
        made.tags.replaceChildren(...tagsOf(one).map((tag) => make("span", "tag", tag)));
        write(made.note, one.note || "");
        for (const cell of made.settings) cell.remove();
        made.settings = shown.map((key) => {
          const cell = make("td", "setting", one.settings.get(key) ?? "–");
          cell.dataset.name = key; cell.hidden = false;
          made.cells.alarms.before(cell);
          return cell;
        });
      }
    };
    const textOf = (id, run) => {
      const one = said.get(id) || {}, verdict = one.verdict || {};
      return [run.name, one.name, run.condition, run.stage, SHORT[verdict.word], verdict.word, verdict.headline, one.tags, one.note,
        ...[...one.settings || []].map(([key, text]) => `${key}=${text}`)].join("\n").toLowerCase();
    };
    const show = () => {
      const began = performance.now(), wanted = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean), own = [];
      const order = [...runs.entries()].sort(([, a], [, b]) => (b.condition === "running") - (a.condition === "running") || b.newest - a.newest);
      const body = $("runs"), counts = new Map(), groups = new Map(), lines = [];
      const groupOf = (id) => $("together").checked && (said.get(id) || {}).group || id;
      let seen = 0;
      for (const [id, run] of order) {
        const made = rows.get(id) || row(id), curve = curveOf(id), text = wanted.length ? textOf(id, run) : "";
        const visible = wanted.every((word) => text.includes(word));
        seen += visible;
        counts.set(run.condition, (counts.get(run.condition) || 0) + 1);
        if (visible) groups.set(groupOf(id), [...groups.get(groupOf(id)) || [], id]);
        if (!said.has(id)) write(made.link, run.name);
        write(made.state, run.condition);
        if (made.state.className !== `state ${run.condition}`) made.state.className = `state ${run.condition}`;
        const left = run.left === null ? "" : `, ${clock(run.left)} left`;
        write(made.cells.step, steps(run) + (run.stage && run.stage !== run.name ? ` ${run.stage}` : "") + left);
        write(made.cells.value, shortNumber(curve ? curve.points.last : null));
        write(made.cells.alarms, run.alarms ? String(run.alarms) : "–");
        write(made.cells.last, ago(run.newest));
        if (curve && visible) {
          const one = { id, ids: [id], name: made.link.textContent, colour: colour(made.place), points: curve.points, curve };
          own.push(one);
        }
      }
      for (const [key, made] of groupRows) if (!((groups.get(key) || []).length > 1)) { made.line.remove(); groupRows.delete(key); }
      for (const [id] of order) {
        const { line } = rows.get(id), ids = groups.get(groupOf(id)) || [], several = ids.length > 1;
        if (several && ids[0] === id) lines.push(groupRow(groupOf(id), ids).line);
        if (line.hidden !== (several || !ids.includes(id))) line.hidden = several || !ids.includes(id);
        lines.push(line);
      }
      lines.forEach((line, place) => { if (body.children[place] !== line) body.insertBefore(line, body.children[place] || null); });
      const series = $("together").checked ? together(own) : own.map(drawnAs), colours = new Map(series.flatMap((one) => one.ids.map((id) => [id, one.colour])));
      for (const { id, curve, name, points } of own) {
        const made = rows.get(id);
        if (made.drawn === curve.tick && made.tint === colours.get(id)) continue;
        made.drawn = curve.tick; made.tint = colours.get(id);
        made.swatch.style.background = made.tint;
        made.small.set([{ id, name, colour: made.tint, points }]);
      }
      for (const [key, made] of groupRows) {
        const one = series.find(({ ids }) => groups.get(key).some((id) => ids.includes(id)));
        made.swatch.style.background = one ? one.colour : "transparent";
        made.small.set(one ? [{ id: key, name: one.name, colour: one.colour, points: one.raw || one.points }] : []);
      }
      for (const [id, made] of rows) if (!colours.has(id)) { made.swatch.style.background = "transparent"; made.tint = null; }
      const words = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
      write($("counts"), runs.size ? `${runs.size} ${runs.size === 1 ? "run" : "runs"}: ${words}${wanted.length ? `; ${seen} shown` : ""}` : "There are no runs in this folder yet.");
      chart.lit = chart.lit && series.find((one) => one.ids.some((id) => chart.lit.ids.includes(id))) || null;
      chart.set(series);
      const out = chart.range && series.length ? chart.range.out : 0, several = series.some((one) => one.ids.length > 1);
      write(document.querySelector("#chart h2"), series.length ? `${current} over steps${several ? ", means of the seeds with their 95% intervals" : ""}${view.smooth ? ", smoothed" : ""}` : `No run has ${current} yet.`);
      write($("value"), current);
      write(document.querySelector("#chart figcaption"), [means.get(current) || "", out ? `${shortNumber(out)} points at 0 or below are not on a logarithmic axis.` : ""].join(" ").trim());
      chart.canvas.setAttribute("aria-label", `${current} of ${series.length} ${several ? "groups of runs" : "runs"} over steps; the table below has their last values`);
      // what tests and benchmarks read
      document.body.dataset.took = performance.now() - began;
      document.body.dataset.points = own.reduce((sum, one) => sum + one.points.x.length, 0);
    };
    // runs that differ in their seeds alone as one line
    const together = (own) => {
      const groups = new Map();
      for (const one of own) { const key = (said.get(one.id) || {}).group || one.id; groups.set(key, [...groups.get(key) || [], one]); }
      return [...groups.values()].map((members, place) => {
        const first = { ...members[0], colour: colour(place) };
        if (members.length === 1) return drawnAs(first);
        const raw = meanOf(members.map((one) => one.points));
        const smooth = view.smooth ? meanOf(members.map((one) => smoothed(one.points, view.smooth))) : raw;
        const name = `${said.get(first.id).title}, mean of ${members.length} seeds`;
        return { id: first.id, ids: members.map((one) => one.id), name, colour: first.colour, points: smooth, band: smooth, raw: view.smooth ? raw : undefined };
      });
    };
    const take = (event) => {
      const held = metrics.get(current), news = JSON.parse(event.data);
      held.since = event.lastEventId;
      let isNew = false;
      for (const [id, run] of Object.entries(news.runs || {})) {
        runs.set(id, run);
        if (run.about) {
          said.set(id, { ...run.about, settings: settingsOf(run.about.configs || []), path: run.name });
          isNew = true;
        }
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
          runs.delete(id); isNew = said.delete(id) || isNew;
          for (const one of metrics.values()) one.curves.delete(id);
          if (rows.has(id)) { rows.get(id).line.remove(); rows.delete(id); }
        }
      }
      write($("note"), news.note);
      show();
      // rows are there now
      if (isNew) { tell(); if ($("filter").value || $("together").checked) show(); }
    };
    const follow = () => {
      if (source) source.close();
      current = select.value;
      keep("metric", current === MAIN[0] ? "" : current);
      if (!metrics.has(current)) metrics.set(current, { since: "", curves: new Map() });
      for (const made of rows.values()) { made.small.set([]); made.drawn = -1; }
      source = new EventSource(`/stream?metric=${encodeURIComponent(current)}&since=${metrics.get(current).since}`);
      source.onmessage = take;
      source.onerror = () => write($("note"), "The dashboard does not answer. The runs go on; this page tries again.");
      if (runs.size) show();
    };
    select.addEventListener("change", follow);
    $("filter").addEventListener("input", () => { keep("runs", $("filter").value.trim()); show(); });
    $("together").addEventListener("change", () => { keep("together", $("together").checked ? "1" : ""); show(); });
    $("every").addEventListener("change", () => { tell(); show(); });
    chosenView(show);
    setInterval(() => {
      for (const [id, made] of rows) write(made.cells.last, ago((runs.get(id) || {}).newest));
      for (const made of groupRows.values()) write(made.cells.last, ago(made.newest));
    }, 5000);
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

    let edited = false;
    $("noted").addEventListener("input", () => { edited = true; write($("kept"), ""); });
    $("noted").addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = new URLSearchParams({ token: document.querySelector('meta[name="token"]').content, tags: $("tags").value, note: $("text").value });
      try {
        const answer = await (await fetch(`/run/${id}/note`, { method: "POST", body })).json();
        write($("kept"), answer.error || "Saved.");
        if (!answer.error) edited = false;
      } catch (error) { write($("kept"), "The dashboard does not answer, so nothing was saved."); }
    });
    for (const link of document.querySelectorAll(".to-report")) link.href = reportOf(id);

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
        if (MAIN.includes(key) || evaluated.has(key) || $("others").open) made.chart.set([drawnAs({ name: key, colour: PALETTE[0], points })]);
      }
    };
    const status = () => {
      const left = run.left === null ? "" : ` · ${clock(run.left)} left`, { verdict } = run.about;
      write($("headline"), verdict && verdict.headline ? verdict.headline : "No verdict yet");
      $("headline").className = `state ${verdict && verdict.headline ? verdict.tone : "none"}`;
      for (const [field, text] of [[$("tags"), run.about.tags], [$("text"), run.about.note]]) {
        if (field.dataset.kept !== text && !edited) { field.value = text || ""; field.dataset.kept = text; }
      }
      if (run.about.configs) {
        const settings = settingsOf(run.about.configs), text = JSON.stringify([...settings]);
        if (settings.size && text !== $("settings").dataset.of) {
          $("settings").dataset.of = text;
          $("settings").replaceChildren(...[...settings].flatMap(([key, value]) => [make("dt", "", key), make("dd", "", value)]));
        }
      }
      write($("name"), run.name); document.title = `${run.name} · ${run.condition} · tether`;
      $("state").className = `quiet state ${run.condition}`;
      write($("state"), `${run.condition} · ${run.stage || "no stage"} · step ${steps(run)}${left} · ${run.means}`);
      $("done").style.width = run.steps ? `${Math.min(100, 100 * run.step / run.steps)}%` : "0";
      $("done").parentElement.hidden = run.condition === "ended" || !run.steps;
      $("requests").hidden = run.condition !== "running";
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
    chosenView(draw);
  };

  if (document.body.dataset.page === "overview") overview(); else runPage();
})();
