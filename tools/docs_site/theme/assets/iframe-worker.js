// Opened from the file system, a page may start no worker, which the search is: it gets a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.room = frame.contentWindow;
      this.room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.room.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = () => {
        const said = this.waiting;
        this.waiting = null;
        said.forEach((data) => this.tell(data));
      };
      this.room.document.head.append(script);
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }
    tell(data) {
      this.room.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {}
  };
}
