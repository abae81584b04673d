// Pause, forks, snapshots, the end.
import { assert, call, fails, until } from './registry.js'

const pause = (y) => (y.sbx.pause ? y.sbx.pause() : y.sbx.betaPause())

call('sandbox.pause (once betaPause)', async (y) => {
  assert.equal(await pause(y), true)
  assert.equal(await y.sbx.isRunning(), false)
  assert.equal((await y.sbx.getInfo()).state, 'paused')
  assert.equal(await pause(y), false)
})

call('commands.run: in a paused sandbox', async (y) => {
  await fails(Error, () => y.sbx.commands.run('true'))
})

call('sandbox.connect: resumes', async (y) => {
  y.sbx = await y.e2b.Sandbox.connect(y.sbx.sandboxId, { timeoutMs: 1_500_000 })
  assert.equal((await y.sbx.commands.run('echo back')).stdout, 'back\n')
})

call('Sandbox.create: lifecycle', async (y) => {
  const made = await y.e2b.Sandbox.create({ timeoutMs: 4000, lifecycle: { onTimeout: 'pause', autoResume: true } })
  await until(async () => (await made.getInfo()).state === 'paused', 30)
  assert.equal((await made.commands.run('echo woken')).stdout, 'woken\n')
  assert(await made.kill())
}, { since: '2.51' })

call('sandbox.fork', async (y) => {
  const forks = await y.sbx.fork({ count: 2 })
  assert.equal(new Set([y.sbx.sandboxId, ...forks.map((one) => one.sandboxId)]).size, 3)
  assert.equal((await forks[0].commands.run('echo fork')).stdout, 'fork\n')
  await Promise.all(forks.map((one) => one.kill()))
}, { since: '2.51' })

call('sandbox.createSnapshot, listSnapshots, Sandbox.deleteSnapshot', async (y) => {
  const made = await y.sbx.createSnapshot({ name: `npm-${process.pid}` })
  assert(made.names[0].includes(`npm-${process.pid}`))
  const found = await y.sbx.listSnapshots().nextItems()
  assert(found.some((one) => one.snapshotId === made.snapshotId))
  const again = await y.e2b.Sandbox.create(made.snapshotId)
  assert.equal((await again.commands.run('echo restored')).stdout, 'restored\n')
  assert(await again.kill())
  assert.equal(await y.e2b.Sandbox.deleteSnapshot(made.snapshotId), true)
  assert.equal(await y.e2b.Sandbox.deleteSnapshot(made.snapshotId), false)
}, { since: '2.51' })

call('sandbox.updateNetwork', async (y) => {
  await y.sbx.updateNetwork({ allowOut: ['example.com'], denyOut: ['0.0.0.0/0'] })
  await y.sbx.updateNetwork({})
}, { since: '2.51' })

call('sandbox.kill', async (y) => {
  assert.notEqual(await y.sbx.kill(), false) // nothing, once
  assert.equal(await y.sbx.isRunning(), false)
  assert.equal(await y.e2b.Sandbox.kill(y.sbx.sandboxId), false)
  await fails(Error, () => y.sbx.commands.run('true'))
})
