// VMs: made and found.
import { assert, call, fails } from './registry.js'

const NOBODY = 'i' + '0'.repeat(19)

call('new Freestyle', async (y) => {
  assert(y.fs.vms && y.fs.git && y.fs.identities && y.fs.domains)
})

call('freestyle (the singleton)', async (y) => {
  assert(Array.isArray((await y.sdk.freestyle.vms.list()).vms))
})

call('new Freestyle: wrong key', async (y) => {
  const stranger = new y.sdk.Freestyle({ apiKey: 'nobody' })
  await fails('UNAUTHORIZED', () => stranger.vms.create())
  await fails('UNAUTHORIZED', () => stranger.vms.list())
})

// Before 0.1.52 these ask for a path without a host, and fail before anything is sent.
call('freestyle.whoami', async (y) => {
  assert.match((await y.fs.whoami()).accountId, /./)
}, { since: '0.1.52' })

call('freestyle.fetch', async (y) => {
  const answer = await y.fs.fetch('/v1/vms')
  assert.equal(answer.status, 200)
}, { since: '0.1.52' })

call('vms.create', async (y) => {
  const made = await y.fs.vms.create()
  assert.match(made.vmId, /^[a-z0-9]{20}$/)
  assert(Array.isArray(made.domains))
  assert.equal((await made.vm.exec('echo hello')).stdout, 'hello\n')
  await made.vm.delete()
})

call('vms.create: options', async (y) => {
  const workdir = y.newerThan('0.1.62') ? {} : { workdir: y.dir }
  const made = await y.fs.vms.create({
    name: 'the machine of this test',
    idleTimeoutSeconds: 1200,
    activityThresholdBytes: 100,
    persistence: { type: 'persistent' },
    ...workdir,
    ...(y.newerThan('0.1.62') ? { spec: new y.sdk.VmSpec().workdir(y.dir) } : {}),
  })
  ;[y.vm, y.vmId] = [made.vm, made.vmId]
  assert.equal((await y.vm.exec('pwd')).stdout, `${y.dir}\n`)
})

call('vms.create: idleTimeoutSeconds null', async (y) => {
  const { vm } = await y.fs.vms.create({ idleTimeoutSeconds: null })
  await vm.delete()
})

call('vms.create: persistence', async (y) => {
  const kinds = [
    { type: 'sticky', priority: 8 },
    { type: 'ephemeral', deleteEvent: 'OnSuspend' },
    { type: 'ephemeral', deleteEvent: 'OnStop' },
    { type: 'persistent' },
  ]
  for (const persistence of kinds) {
    const { vm, vmId } = await y.fs.vms.create({ persistence })
    const row = (await y.fs.vms.list()).vms.find((one) => one.id === vmId)
    assert.deepEqual(row.persistence, persistence)
    await vm.delete()
  }
})

call('vms.create: deleteEvent', async (y) => {
  const { vm } = await y.fs.vms.create({ persistence: { type: 'ephemeral', deleteEvent: 'OnStop' } })
  await vm.exec(`mkdir -p ${y.dir} && echo kept > ${y.path('event')}`)
  await vm.suspend()
  assert.equal((await vm.exec(`cat ${y.path('event')}`)).stdout, 'kept\n')
  if (y.newerThan('0.1.48')) {
    await vm.resize(y.newerThan('0.1.62') ? { storage: 12 } : { rootfsSizeGb: 12 })
    assert.equal((await vm.exec(`cat ${y.path('event')}`)).stdout, 'kept\n')
  }
  await vm.stop()
  await fails('VM_DELETED', () => vm.getInfo())
  const short = await y.fs.vms.create({ persistence: { type: 'ephemeral' } })
  await short.vm.suspend()
  await fails('VM_DELETED', () => short.vm.exec('true'))
})

call('vms.create: sizes', async (y) => {
  const { vm, vmId } = await y.fs.vms.create({ vcpuCount: 2, memSizeGb: 1, rootfsSizeGb: 10 })
  const row = (await y.fs.vms.list()).vms.find((one) => one.id === vmId)
  assert.deepEqual(row.sizing, { vcpuCount: 2, memSizeMib: 1024, rootfsSizeMb: 10240 })
  await vm.delete()
})

call('vms.create: sizes that cannot be', async (y) => {
  await fails('CREATE_VM_BAD_REQUEST', () => y.fs.vms.create({ memSizeGb: 3 }))
  await fails('CREATE_VM_BAD_REQUEST', () => y.fs.vms.create({ vcpuCount: 64 }))
})

call('vms.create: unknown snapshot', async (y) => {
  await fails('SNAPSHOT_NOT_FOUND', () => y.fs.vms.create({ snapshotId: 'sc-' + '0'.repeat(20) }))
})

call('vms.create: logger', async (y) => {
  const lines = []
  const { vm } = await y.fs.vms.create({ logger: (line) => lines.push(line) })
  await vm.delete()
})

call('vms.list', async (y) => {
  const found = await y.fs.vms.list()
  const row = found.vms.find((one) => one.id === y.vmId)
  assert.deepEqual([row.name, row.state, row.deleted], ['the machine of this test', 'running', false])
  assert(found.totalCount >= 1 && found.runningCount >= 1)
  assert(Date.parse(row.createdAt) > Date.now() - 600_000)
})

call('vms.get', async (y) => {
  const { vm } = await y.fs.vms.get({ vmId: y.vmId })
  assert.equal((await vm.exec('echo $((6 * 7))')).stdout, '42\n')
})

call('vms.ref', async (y) => {
  assert.equal((await y.fs.vms.ref({ vmId: y.vmId }).exec('echo ref')).stdout, 'ref\n')
})

call('vm.getInfo', async (y) => {
  const info = await y.vm.getInfo()
  assert.deepEqual([info.id, info.state, info.recreate], [y.vmId, 'running', false])
})

call('vm.getInfo: unknown VM', async (y) => {
  await fails('VM_NOT_FOUND', () => y.fs.vms.ref({ vmId: NOBODY }).getInfo())
})

call('vms.delete', async (y) => {
  const { vmId } = await y.fs.vms.create()
  assert.equal((await y.fs.vms.delete({ vmId })).id, vmId)
  assert(!(await y.fs.vms.list()).vms.some((one) => one.id === vmId))
  await fails('VM_DELETED', () => y.fs.vms.ref({ vmId }).getInfo())
})

call('vm.delete', async (y) => {
  const { vm, vmId } = await y.fs.vms.create()
  assert.equal((await vm.delete()).id, vmId)
})
