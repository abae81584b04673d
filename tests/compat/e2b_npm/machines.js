// What only a machine has: memory that sleeps, memory that is forked, ports that others open.
import { request } from 'node:http'
import { assert, call, until } from './registry.js'

const VM = { vm: true }
const BOOT = 'cat /proc/sys/kernel/random/boot_id'

call('sandbox.pause, connect: memory is kept', async (y) => {
  const made = await y.e2b.Sandbox.create({ timeoutMs: 300_000 })
  const boot = (await made.commands.run(BOOT)).stdout
  const { pid } = await made.commands.run('sleep 1000', { background: true })
  await made.pause()
  const again = await y.e2b.Sandbox.connect(made.sandboxId, { timeoutMs: 300_000 })
  assert.equal((await again.commands.run(BOOT)).stdout, boot)
  assert((await again.commands.list()).some((one) => one.pid === pid))
  y.machine = again
}, VM)

call('pty: a terminal goes on in a fork', async (y) => {
  const parent = y.machine
  const seen = { parent: '', child: '' }
  const text = (data) => Buffer.from(data).toString()
  const terminal = await parent.pty.create({ cols: 80, rows: 24, timeoutMs: 0, onData: (data) => { seen.parent += text(data) } })
  await parent.pty.sendInput(terminal.pid, Buffer.from('mark=before\n'))
  await parent.pty.sendInput(terminal.pid, Buffer.from('echo is-$mark\n'))
  await until(() => seen.parent.includes('is-before'), 30)
  const [child] = await parent.fork()
  const again = await child.pty.connect(terminal.pid, { onData: (data) => { seen.child += text(data) } })
  await child.pty.sendInput(terminal.pid, Buffer.from('echo child-$mark\n'))
  await until(() => seen.child.includes('child-before'), 30)
  await parent.pty.sendInput(terminal.pid, Buffer.from('echo parent-$mark\n'))
  await until(() => seen.parent.includes('parent-before'), 30)
  assert(!seen.parent.includes('child-') && !seen.child.includes('parent-'))
  await again.disconnect()
  assert.equal(await child.pty.kill(terminal.pid), true)
  assert.equal(await parent.pty.kill(terminal.pid), true)
  assert(await child.kill())
}, VM)

function status(host) {
  return new Promise((done, failed) => {
    const asked = request(process.env.E2B_API_URL, { headers: { Host: host } }, (answer) => done(answer.resume().statusCode))
    asked.on('error', failed).end()
  })
}

call('a port of a sandbox is opened from outside', async (y) => {
  await y.machine.commands.run('python3 -m http.server 8000 --bind 127.0.0.1', { background: true, timeoutMs: 0 })
  await until(async () => (await status(`8000-${y.machine.sandboxId}.localhost`)) === 200, 60)
  assert(await y.machine.kill())
}, VM)
