// Sandboxes: made, found, ended.
import { assert, call, fails, until } from './registry.js'

const NOBODY = 'i' + '0'.repeat(19)

call('Sandbox.create', async (y) => {
  y.sbx = await y.e2b.Sandbox.create({
    timeoutMs: 1_200_000,
    metadata: y.metadata,
    envs: { GREETING: 'hello', ...y.envs },
  })
  assert.match(y.sbx.sandboxId, /^[a-z0-9]+$/)
  await y.sbx.files.makeDir(y.dir)
})

call('Sandbox.create: unknown template', async (y) => {
  await fails(Error, () => y.e2b.Sandbox.create('no-such-template'), 'not found')
})

call('Sandbox.create: wrong key', async (y) => {
  await fails(y.e2b.AuthenticationError, () => y.e2b.Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }))
})

call('Sandbox.create: allowInternetAccess, network', async (y) => {
  const one = await y.e2b.Sandbox.create({ allowInternetAccess: false })
  assert(await one.kill())
  const other = await y.e2b.Sandbox.create({ network: { allowOut: ['example.com'], denyOut: ['0.0.0.0/0'] } })
  assert(await other.kill())
}, { since: '2.51' })

call('sandbox.isRunning', async (y) => assert.equal(await y.sbx.isRunning(), true))

call('sandbox.getInfo', async (y) => {
  const info = await y.sbx.getInfo()
  assert.equal(info.sandboxId, y.sbx.sandboxId)
  assert.deepEqual(info.metadata, y.metadata)
  assert.equal(info.templateId, 'base')
  assert.equal(info.state, 'running')
  assert(info.endAt - info.startedAt > 1_100_000)
})

call('Sandbox.getInfo: unknown id', async (y) => {
  await fails(y.e2b.NotFoundError, () => y.e2b.Sandbox.getInfo(NOBODY))
})

call('Sandbox.list', async (y) => {
  const pages = y.e2b.Sandbox.list()
  const found = await pages.nextItems()
  assert(found.some((one) => one.sandboxId === y.sbx.sandboxId))
})

call('Sandbox.list: metadata, state', async (y) => {
  const pages = y.e2b.Sandbox.list({ query: { metadata: y.metadata, state: ['running'] } })
  assert.deepEqual((await pages.nextItems()).map((one) => one.sandboxId), [y.sbx.sandboxId])
  assert.equal(pages.hasNext, false)
  const none = y.e2b.Sandbox.list({ query: { metadata: { purpose: 'another' } } })
  assert.deepEqual(await none.nextItems(), [])
})

call('Sandbox.list: pages', async (y) => {
  const mark = { pages: String(process.hrtime.bigint()) }
  const made = []
  for (let n = 0; n < 3; n++) made.push(await y.e2b.Sandbox.create({ metadata: mark }))
  const pages = y.e2b.Sandbox.list({ query: { metadata: mark }, limit: 2 })
  const found = await pages.nextItems()
  assert.equal(pages.hasNext, true)
  found.push(...(await pages.nextItems()))
  assert.equal(pages.hasNext, false)
  assert.deepEqual(found.map((one) => one.sandboxId), made.map((one) => one.sandboxId).reverse())
  await Promise.all(made.map((one) => one.kill()))
})

call('sandbox.setTimeout', async (y) => {
  await y.sbx.setTimeout(1_800_000)
  const info = await y.sbx.getInfo()
  assert(info.endAt - info.startedAt > 1_700_000)
  await fails(y.e2b.NotFoundError, () => y.e2b.Sandbox.setTimeout(NOBODY, 1000))
})

call('timeout ends a sandbox', async (y) => {
  const made = await y.e2b.Sandbox.create({ timeoutMs: 4000 })
  await until(async () => !(await made.isRunning()), 30)
})

call('Sandbox.connect', async (y) => {
  const before = (await y.sbx.getInfo()).endAt
  const again = await y.e2b.Sandbox.connect(y.sbx.sandboxId, { timeoutMs: 10_000 })
  assert.equal((await again.commands.run('echo connected')).stdout, 'connected\n')
  assert.deepEqual((await y.sbx.getInfo()).endAt, before)
  await fails(y.e2b.NotFoundError, () => y.e2b.Sandbox.connect(NOBODY))
})

call('sandbox.getMetrics', async (y) => {
  const found = await y.sbx.getMetrics()
  assert(found.at(-1).memTotal > 0)
  assert(found.at(-1).cpuCount >= 1)
})

call('sandbox.getMetrics: start, end', async (y) => {
  const [now, day] = [Date.now(), 86_400_000]
  const found = await y.sbx.getMetrics({ start: new Date(now - day), end: new Date(now + 60_000) })
  assert(Math.abs(found.at(-1).timestamp.getTime() - now) < 60_000)
  assert.deepEqual(await y.sbx.getMetrics({ start: new Date(now - 2 * day), end: new Date(now - day) }), [])
}, { since: '2.51' })

call('sandbox.getHost', async (y) => {
  assert(y.sbx.getHost(3000).startsWith(`3000-${y.sbx.sandboxId}.`))
})
