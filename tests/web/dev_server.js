// A dev server in small: serves app.js into a page, watches it, and tells the page over a WebSocket to take the new one
// in without loading again. Listens on the loopback only, and refuses host names it does not know, as dev servers do.
const http = require("http"), fs = require("fs"), crypto = require("crypto")

const page = `<!doctype html><title>dev</title><body><h1 id="made">starting</h1><p id="kept"></p><script>
  document.getElementById("kept").textContent = "loaded " + performance.timeOrigin
  const render = () => import("/app.js?" + Date.now()).then(app => { document.getElementById("made").textContent = app.text })
  const follow = () => {
    const socket = new WebSocket("ws://" + location.host + "/hot", "hot-reload")
    socket.onopen = () => { document.body.dataset.connected = "yes" }
    socket.onmessage = render
    socket.onclose = () => setTimeout(follow, 200)
  }
  render(); follow()
</script>`

const sockets = new Set()
const server = http.createServer((request, response) => {
  if (!/\.localhost(:\d+)?$/.test(request.headers.host)) { response.statusCode = 403; return response.end("unknown host") }
  if (request.url === "/") return response.setHeader("Content-Type", "text/html"), response.end(page)
  if (request.url.startsWith("/app.js")) {
    response.setHeader("Content-Type", "text/javascript")
    return fs.createReadStream("/app/app.js").pipe(response)
  }
  response.statusCode = 404
  response.end()
})
server.on("upgrade", (request, socket) => {
  const key = request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
  const accept = crypto.createHash("sha1").update(key).digest("base64")
  socket.write(["HTTP/1.1 101 Switching Protocols", "Upgrade: websocket", "Connection: Upgrade",
    `Sec-WebSocket-Accept: ${accept}`, "Sec-WebSocket-Protocol: hot-reload", "", ""].join("\r\n"))
  sockets.add(socket)
  socket.on("close", () => sockets.delete(socket))
  socket.on("error", () => {})
  socket.on("data", () => {})
})
fs.watch("/app", () => {
  for (const socket of sockets) socket.write(Buffer.concat([Buffer.from([129, 6]), Buffer.from("update")]))
})
server.listen(5173, "127.0.0.1")
