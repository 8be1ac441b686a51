"use strict";
// What the pages compute from curves and settings, without a page.

// An exponential mean: `weight` is kept from one step to the next, steps being as far apart as the closest two. Dividing by the weights so far removes the bias of the start.
const smoothed = ({ x, y }, weight) => {
  let unit = Infinity, sum = 0, mass = 0;
  for (let i = 1; i < x.length; i++) if (x[i] > x[i - 1]) unit = Math.min(unit, x[i] - x[i - 1]);
  const values = y.map((value, i) => {
    const left = i ? weight ** Math.max(0, (x[i] - x[i - 1]) / unit || 0) : 0;
    sum = left * sum + (1 - weight) * value; mass = left * mass + (1 - weight);
    return sum / mass;
  });
  return { x, y: values };
};

// By degrees of freedom from 2 on.
const STUDENT = [4.302652729749, 3.182446305284, 2.776445105198, 2.570581835636, 2.446911851145, 2.364624251593, 2.306004135204, 2.262157162798, 2.228138851986, 2.200985160092, 2.178812829667, 2.160368656463, 2.144786687918, 2.13144954556, 2.119905299221, 2.109815577833, 2.100922040241, 2.093024054408, 2.085963447266, 2.079613844728, 2.073873067904, 2.068657610419, 2.063898561628, 2.059538552753, 2.055529438643, 2.05183051648, 2.048407141795, 2.045229642133, 2.042272456301, 2.039513446396, 2.03693334346, 2.034515297449, 2.032244509318, 2.03010792825, 2.02809400098, 2.026192463029, 2.024394163912, 2.022690920037, 2.021075390306];

// The mean of several curves, at each step of any over those that have begun and not ended there, and from three on its interval:
// mean ± t s / √n with Student's t, as `stats.mean_of_runs` has it for runs that share no prompts.
const meanOf = (curves) => {
  const x = [...new Set(curves.flatMap((one) => [...one.x]))].sort((a, b) => a - b), y = [], low = [], high = [];
  const places = curves.map(() => 0);
  for (const step of x) {
    const values = [];
    curves.forEach((one, i) => {
      const last = one.x.length - 1;
      if (last < 0 || step < one.x[0] || step > one.x[last]) return;
      while (places[i] < last && one.x[places[i] + 1] <= step) places[i]++;
      const at = places[i], share = at < last ? (step - one.x[at]) / (one.x[at + 1] - one.x[at]) : 0;
      values.push(share > 0 ? one.y[at] + share * (one.y[at + 1] - one.y[at]) : one.y[at]);
    });
    const count = values.length, mean = values.reduce((sum, value) => sum + value, 0) / count;
    const spread = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, count - 1);
    const reach = count > 2 ? STUDENT[Math.min(count - 3, STUDENT.length - 1)] * Math.sqrt(spread / count) : NaN;
    y.push(mean); low.push(mean - reach); high.push(mean + reach);
  }
  return { x, y, low, high };
};

// The settings of a run by dotted key, from the configs of its stages. A model that another stage made is a folder, no setting.
const settingsOf = (configs) => {
  const settings = new Map();
  const add = (value, key) => {
    if (value && typeof value === "object" && !Array.isArray(value)) for (const name of Object.keys(value)) add(value[name], key ? `${key}.${name}` : name);
    else {
      const text = typeof value === "string" ? value : JSON.stringify(value);
      if (key && !settings.has(key) && !(key === "model.source" && text.endsWith("/model"))) settings.set(key, text);
    }
  };
  for (const config of configs) add(config, "");
  return settings;
};
const isSeed = (key) => /(^|\.)seed$/.test(key);

// The keys of which runs have different values, those of most runs first.
const differing = (all) => {
  const values = new Map(), counts = new Map();
  for (const settings of all) {
    for (const [key, text] of settings) {
      if (!values.has(key)) values.set(key, new Set());
      values.get(key).add(text); counts.set(key, (counts.get(key) || 0) + 1);
    }
  }
  return [...values.keys()].filter((key) => values.get(key).size > 1).sort((a, b) => counts.get(b) - counts.get(a));
};

// The combination of a sweep that a run is, by the table in the sweep's folder: what those have in common whose last stage lies there.
const combinationOf = (name, tables) => {
  const [home, folder] = name.split("/sweep/"), place = folder === undefined ? "" : `sweep/${folder}/`;
  const table = tables.get(home), rows = table && Array.isArray(table.combinations) ? table.combinations : [];
  const own = rows.filter((row) => {
    const last = row && row.values && row.stages ? String(Object.values(row.stages).pop()) : "";
    return last && (place ? last.startsWith(place) : !last.startsWith("sweep/"));
  }).map((row) => Object.entries(row.values).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`));
  return own.length ? own[0].filter((text) => own.every((other) => other.includes(text))) : [];
};

// What runs that differ in their seeds alone have in common, for each run: of a sweep its folder and its other values, else all other settings.
// A run that has not ended has no settings yet of stages that have not begun. It goes with the one group that agrees with it in all that it has.
const groupsOf = (runs) => {
  const settings = new Map(), ended = new Set(), names = runs.map((one) => {
    if (one.combination.length) return [one.path.split("/sweep/")[0], ...one.combination.filter((part) => !isSeed(part.split("=")[0]))].join(" · ");
    const own = [...one.settings].filter(([key]) => !isSeed(key)).sort(([a], [b]) => a < b ? -1 : 1), name = JSON.stringify(own);
    settings.set(name, new Map(own));
    if (one.ended) ended.add(name);
    return name;
  });
  const wider = new Map(), begun = [...settings.keys()].filter((name) => !ended.has(name) && settings.get(name).size);
  for (const name of begun.sort((a, b) => settings.get(b).size - settings.get(a).size)) {
    const own = settings.get(name);
    const fitting = [...settings].filter(([, other]) => other.size > own.size && [...own].every(([key, text]) => other.get(key) === text));
    if (fitting.length === 1) { wider.set(name, wider.get(fitting[0][0]) || fitting[0][0]); settings.delete(name); }
  }
  return names.map((name) => wider.get(name) || name);
};
