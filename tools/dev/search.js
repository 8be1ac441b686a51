// The search of the manual, in place of the theme's: it speaks the theme's messages. A word of the
// query may be any of its synonyms (search.toml), words of titles and of the contents count more than
// words of texts, and guides come before reference, code and decisions. Words are compared without
// their endings.
const STOP = new Set(
  `a an and are as at be can could do does for from have how i if in into is it its me my of on or should that
  the their them there this to too was what when where which who why will with would you your work works
  working get got need want use using make am im about any good out`.split(/\s+/),
);
const WEIGHTS = { title: 6, abstract: 4, page: 2, text: 1 };
const USUAL = { title: 4, abstract: 10, page: 4, text: 120 }; // lengths in words
const OPENING = /<[^>]*>|&\w+;/g;
const WORD = /[\p{L}\p{N}]+(?:[.'_][\p{L}\p{N}]+)*\+*/gu;

const spoken = (list) => [...list].map(({ word }) => word).filter((word) => !STOP.has(word));

let sections = [];
let terms = new Map();
let settings = { rooms: {}, synonyms: {}, abstracts: {} };

const plain = (word) => word.normalize("NFKD").toLowerCase().replace(/'s?$/, "");

// Words without endings, so that "resuming" finds "resume" and "annotators" finds "annotation".
const stem = (word) => {
  if (word.length < 5 || /[^a-z]/.test(word)) return word.length > 3 ? word.replace(/([^s])s$/, "$1") : word;
  const cut = word.replace(/(ations?|ators?|ating|ated|ates|ate|ings?|ers?|ed|es|e|s|ly)$/, "");
  return (cut.length < 3 ? word : cut).replace(/(.)\1$/, "$1");
};

// The words of a text with their places. A tag or an entity becomes spaces; parts of a name such as
// policy/clip_fraction are words, too.
function* words(text) {
  const bare = text.replace(OPENING, (tag) => " ".repeat(tag.length));
  for (const { 0: word, index } of bare.matchAll(WORD)) {
    yield { word: plain(word), start: index, end: index + word.length };
    if (/[._]/.test(word)) {
      for (const part of word.matchAll(/[\p{L}\p{N}]{2,}/gu)) {
        const start = index + part.index;
        yield { word: plain(part[0]), start, end: start + part[0].length };
      }
    }
  }
}

// The beginning that all addresses share: the theme makes them absolute.
const shared = (places) =>
  places.reduce((start, place) => {
    while (!place.startsWith(start)) start = start.slice(0, start.slice(0, -1).lastIndexOf("/") + 1);
    return start;
  }, places[0].replace(/[^/]*$/, ""));

function begin({ config, items }) {
  settings = { ...settings, ...config.manual };
  terms = new Map();
  const above = shared(items.map(({ location }) => location)).length;
  const rooms = Object.keys(settings.rooms).sort((a, b) => b.length - a.length);
  sections = items.map((item, number) => {
    const place = item.location.slice(above);
    const top = !place.includes("#");
    const own = [...new Set([item.title, ...(top ? item.path.slice(-1) : [])])];
    const fields = {
      title: own.join(" "),
      abstract: settings.abstracts[place] ?? "",
      page: item.path.slice(1).join(" "),
      text: item.text,
    };
    const lengths = {};
    for (const [field, text] of Object.entries(fields)) {
      const stems = [...words(text)].map(({ word }) => stem(word));
      lengths[field] = stems.length;
      for (const key of stems) {
        if (!terms.has(key)) terms.set(key, new Map());
        const counts = terms.get(key);
        if (!counts.has(number)) counts.set(number, { title: 0, abstract: 0, page: 0, text: 0 });
        counts.get(number)[field] += 1;
      }
    }
    const titles = own.map((title) => spoken(words(title)).map(stem));
    return { item, lengths, titles, top, room: settings.rooms[rooms.find((name) => place.startsWith(name))] ?? 1 };
  });
}

// How much a section is about a stem: counts of its fields, of which many count little more than one.
function weight(number, count) {
  let sum = 0;
  for (const [field, times] of Object.entries(count)) {
    if (times) sum += (WEIGHTS[field] * times) / (0.6 + (0.4 * sections[number].lengths[field]) / USUAL[field]);
  }
  return sum / (sum + 1.5);
}

// One letter more, less or other, or two that changed places.
const near = (a, b) => {
  let i = 0;
  while (i < a.length && a[i] === b[i]) i += 1;
  const [left, right] = [a.slice(i), b.slice(i)];
  const swapped = right[1] + right[0] + right.slice(2);
  return [right.slice(1), swapped].includes(left) || left.slice(1) === right || left.slice(1) === right.slice(1);
};

// Stems that a typed word stands for, each with its share: itself, longer words that begin so where
// it is the last one, and for a word that no page has, those that differ by one letter.
function stands(word, last) {
  const key = stem(word);
  const found = new Map(terms.has(key) ? [[key, 1]] : []);
  for (const term of last && word.length > 1 ? terms.keys() : []) {
    if (term !== key && term.startsWith(word)) found.set(term, (0.4 * word.length) / term.length);
  }
  if (!found.size && word.length > 3) {
    for (const term of terms.keys()) if (near(term, key)) found.set(term, 0.5);
  }
  return found;
}

// The share of every section for one alternative: the least of its words'.
function matched(phrase, last) {
  let all = null;
  for (const word of phrase) {
    const here = new Map();
    for (const [term, share] of stands(word, last)) {
      for (const [number, count] of terms.get(term) ?? []) {
        here.set(number, Math.max(here.get(number) ?? 0, share * weight(number, count)));
      }
    }
    for (const [number, share] of all ?? []) {
      if (here.has(number)) here.set(number, Math.min(share, here.get(number)));
    }
    for (const number of all ? here.keys() : []) if (!all.has(number)) here.delete(number);
    all = here;
  }
  return all;
}

// What is asked for: each phrase of search.toml, or a word, with what may stand in its place.
function concepts(typed) {
  const phrases = Object.entries(settings.synonyms).map(([name, others]) => ({ name: name.split(" "), others }));
  phrases.sort((a, b) => b.name.length - a.name.length);
  const asked = [];
  for (let i = 0; i < typed.length; ) {
    const hit = phrases.find(({ name }) => name.every((word, k) => stem(typed[i + k] ?? "") === stem(word)));
    const own = hit ? hit.name : [typed[i]];
    i += own.length;
    if (hit || !STOP.has(own[0])) {
      const others = (hit?.others ?? []).map((other) => other.split(" "));
      const bare = own.filter((word) => !STOP.has(word));
      asked.push({ last: i === typed.length, all: [bare.length ? bare : own, ...others] });
    }
  }
  return asked.length ? asked : typed.map((word) => ({ last: true, all: [[word]] }));
}

function search(input) {
  const typed = [...new Set([...words(input)].map(({ word }) => word))];
  const asked = concepts(typed);
  const scores = new Map();
  let total = 0;
  for (const { all, last } of asked) {
    const best = new Map();
    for (const [k, phrase] of all.entries()) {
      for (const [number, share] of matched(phrase, last && !k)) {
        best.set(number, Math.max(best.get(number) ?? 0, k ? 0.9 * share : share));
      }
    }
    const rare = Math.log(1 + sections.length / (1 + best.size));
    total += rare;
    for (const [number, share] of best) {
      const { sum, parts } = scores.get(number) ?? { sum: 0, parts: 0 };
      scores.set(number, { sum: sum + rare * share, parts: parts + rare });
    }
  }
  const said = new Set(asked.flatMap(({ all }) => all.flat().map(stem)));
  return [...scores]
    .map(([number, { sum, parts }]) => {
      const { room, titles, top } = sections[number];
      const covered = titles.map((title) => title.filter((word) => said.has(word)).length / (title.length || 1));
      const whole = (parts / total) ** 2;
      return { number, asked, score: sum * whole * room * (1 + 0.6 * Math.max(...covered)) * (top ? 1.15 : 1) };
    })
    .sort((a, b) => b.score - a.score || a.number - b.number);
}

// The places in a text that the theme marks: value is the length of the part that is underlined.
function marks(text, stems) {
  const ranges = [];
  for (const { word, start, end } of words(text)) {
    const last = ranges.at(-1);
    if (!(last && start < last.end) && stems.has(stem(word))) ranges.push({ start, end, value: end - start });
  }
  return ranges.slice(0, 40);
}

// The part of the manual that a section is in: the filters of the search.
const partOf = ({ item }) => (item.path.length > 1 ? item.path[0] : "Other pages");

let found = [];
let parts = [];

function answer({ input, filter, page }) {
  const size = 10;
  const from = page?.from ?? 0;
  if (!page) {
    const all = search(typeof input === "string" ? input : "");
    const counts = new Map();
    for (const { number } of all) {
      const part = partOf(sections[number]);
      counts.set(part, (counts.get(part) ?? 0) + 1);
    }
    parts = [...counts].map(([value, count]) => ({ node: { value, count } }));
    const chosen = (filter?.input?.data?.operands ?? []).map(({ data }) => data.value);
    found = chosen.length ? all.filter(({ number }) => chosen.includes(partOf(sections[number]))) : all;
  }
  const stems = new Set();
  for (const { all, last } of found[0]?.asked ?? []) {
    for (const word of all.flat()) for (const term of stands(word, last).keys()) stems.add(term);
  }
  const items = found.slice(from, from + size).map(({ number }) => {
    const { item } = sections[number];
    const matches = ["title", "text"].map((field, k) => ({
      id: number * 2 + k,
      field,
      score: 0,
      value: { highlight: { ranges: marks(item[field], stems) } },
    }));
    return { id: number, matches: matches.filter(({ value }) => value.highlight.ranges.length) };
  });
  const beside = (start) => (start >= 0 && start < found.length ? { id: 1, size, from: start } : undefined);
  return {
    items,
    query: { select: { documents: null, terms: null }, values: [] },
    aggregations: [{ type: "term", data: { value: parts } }],
    pagination: { total: found.length, prev: beside(from - size), next: beside(from + size) },
  };
}

self.onmessage = ({ data: { type, data } }) => {
  if (type === 0) {
    begin(data);
    self.postMessage({ type: 1 });
  } else if (type === 2) self.postMessage({ type: 3, data: answer(data) });
};
