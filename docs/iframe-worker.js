/* The search runs in a Worker, and a browser starts none from a page that it opened from disk. There a Worker is a
   hidden frame of the page: it loads the same script, and has a message stand for each message of a Worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const script = document.createElement("script");
      script.src = new URL(address, document.baseURI).href;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = script.outerHTML;
      this.inside = new Promise(loaded => {
        this.frame.onload = () => loaded(this.frame.contentWindow);
      }).then(inside => {
        inside.postMessage = data =>
          this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
        return inside;
      });
      document.documentElement.append(this.frame);
    }

    postMessage(data) {
      this.inside.then(inside =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
