// The site's search computes in a worker, and browsers start none from a file. There, its script
// runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => {
          this.onmessage?.(message);
          this.dispatchEvent(message);
        });
      };
      const script = frame.contentDocument.createElement("script");
      this.started = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      const message = new MessageEvent("message", { data: structuredClone(data) });
      await this.started;
      this.inside.dispatchEvent(message);
    }
  };
}
