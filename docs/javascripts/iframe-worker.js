// Search on pages that are opened from a disk. Browsers start no workers for file:// URLs, so this class runs the
// worker's script in a hidden frame. The script checks whether its parent has the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.document.open() // Firefox would otherwise replace the document of a new frame later
      this.scope.document.write("<!doctype html><body></body>")
      this.scope.document.close()
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.scope.document.createElement("script")
      script.src = new URL(url, location.href).href
      this.loaded = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${script.src}`))
      })
      this.scope.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
