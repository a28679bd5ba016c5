// Search without a server: a browser starts no worker for a page from the disk, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      const script = `<script>postMessage = data => parent.fromWorker(data)</` + `script><script src="${new URL(url, location)}"></` + `script>`
      this.loaded = new Promise(done => (this.frame.onload = done))
      window.fromWorker = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.frame.srcdoc = script
      document.body.append(this.frame)
    }
    async postMessage(data) {
      await this.loaded
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
