// Browsers start no worker for a page that lies on a disk. There the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      document.body.append(this.frame);
      this.inner = this.frame.contentWindow;
      this.frame.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      this.inner.document.open();
      this.inner.postMessage = (data) =>
        this.later(data, (event) => {
          if (this.onmessage) this.onmessage(event);
        });
      this.inner.document.write(`<script src="${encodeURI(decodeURI(url))}"></` + "script>");
      this.inner.document.close();
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.later(data, (event) => this.inner.onmessage(event));
    }

    // As between threads: a copy, and only after the present call has returned.
    later(data, receive) {
      const copy = structuredClone(data);
      setTimeout(() => receive(new MessageEvent("message", { data: copy })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}

// A table that is wider than the page is scrolled by keyboard too: the theme makes its frame.
const reach = () => {
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap")) {
    if (frame.scrollWidth > frame.clientWidth) frame.tabIndex = 0;
    else frame.removeAttribute("tabindex");
  }
};
addEventListener("load", () => setTimeout(reach));
addEventListener("resize", reach);
