// Everything works without this file; it adds keys, timing, focus, and long texts in place.
"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const writes = (element) => element.matches("textarea, select, input:not([type=radio]):not([type=checkbox])");

  const said = one("#said");
  const say = (text) => {
    if (!said) return;
    said.textContent = "";
    setTimeout(() => { said.textContent = text; }, 60); // a screen reader speaks changes only
  };

  // An invitation: the code behind the # goes into the form and out of the address.
  const join = one("#join");
  const invited = () => {
    if (!join || location.hash.length < 20) return;
    join.elements.code.value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname);
    join.requestSubmit();
  };
  invited();
  addEventListener("hashchange", invited);

  all("[data-select]").forEach((field) => field.addEventListener("focus", () => field.select()));

  all("a.whole").forEach((link) => link.addEventListener("click", async (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    try {
      const answer = await fetch(link.href);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const text = page.querySelector("#whole .text");
      if (!answer.ok || !text) throw new Error(String(answer.status));
      const place = link.closest(".more");
      place.previousElementSibling.replaceWith(document.adoptNode(text));
      place.remove();
      text.tabIndex = -1;
      text.focus({ preventScroll: true });
    } catch { location.href = link.href; }
  }));

  let sent = false;
  document.addEventListener("submit", (event) => {
    const idle = event.submitter && event.submitter.formMethod === "dialog"; // Enter in a field of the verdict
    if (sent || idle) event.preventDefault();
    sent = sent || !idle;
  });
  addEventListener("pageshow", () => { sent = false; });

  const verdict = one("#verdict");
  if (!verdict) { if (said && said.textContent) say(said.textContent); return; }

  // A new task: its heading has the focus, and only the time counts in which it can be seen.
  if (said.textContent) say(said.textContent);
  one("#task").focus({ preventScroll: true });
  history.replaceState(null, "", "/judge");
  let seen = 0, since = document.hidden ? null : performance.now();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && since !== null) { seen += performance.now() - since; since = null; }
    if (!document.hidden && since === null) since = performance.now();
  });
  verdict.addEventListener("submit", () => {
    const now = since === null ? 0 : performance.now() - since;
    verdict.elements.seconds.value = ((seen + now) / 1000).toFixed(2);
  });

  // Keys. They wait a moment with each task, so that a key pressed twice does not judge two.
  const box = one("#keys");
  box.closest("label").hidden = false;
  try { box.checked = localStorage.getItem("keys") !== "off"; } catch { /* kept for this page only */ }
  const show = () => document.body.classList.toggle("keyed", box.checked);
  box.addEventListener("change", () => {
    show();
    try { localStorage.setItem("keys", box.checked ? "on" : "off"); } catch { /* as above */ }
  });
  show();
  let ready = false;
  setTimeout(() => { ready = true; document.body.dataset.ready = "yes"; }, 300);
  const strengths = all('input[name="strength"]');
  // The first question without an answer; the heading when there is none (left).
  const ask = () => {
    const open = all(".question").find((set) => !set.querySelector(":checked"));
    (open ? open.querySelector("input") : one("#task")).focus({ preventScroll: !open });
  };
  const others = {
    m: () => {
      const next = strengths[(strengths.findIndex((radio) => radio.checked) + 1) % strengths.length];
      next.checked = true;
      say("How much better: " + next.parentElement.textContent.trim());
    },
    c: () => one("#comment").focus(),
    w: () => { one("#better").open = true; one("#correction").focus(); },
    q: () => { pointed = false; ask(); },
    f: () => {
      const flag = one("#flag");
      if (!flag) return;
      flag.open = true;
      one("#reason").focus();
    },
  };
  let pointed = false; // a rating takes digits where keys led to it, and not after a click
  addEventListener("pointerdown", () => { pointed = true; });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Tab" || event.key.startsWith("Arrow")) pointed = false;
    if (event.key === "Escape" && writes(event.target)) return void one("#task").focus({ preventScroll: true });
    if (!box.checked || event.repeat || event.ctrlKey || event.altKey || event.metaKey || writes(event.target)) return;
    const key = event.key.toLowerCase();
    const radio = /^[1-7]$/.test(key) && event.target.type === "radio" && all(`.criterion input[name="${event.target.name}"]`)[key - 1];
    if (!pointed && radio) {
      radio.checked = true;
      if (radio.closest(".question")) ask(); else radio.focus();
      return void event.preventDefault();
    }
    const button = one(`button[data-key="${CSS.escape(key)}"]`);
    if (!button && !others[key]) return;
    event.preventDefault();
    if (button && ready) button.click();
    else if (!button) others[key]();
  });
})();
