// Specs whose steps any machine can show: layers that are built once, steps that fail, builds.
import { assert, call, fails } from './registry.js'

const setup = (name, ...exec) => ({ name, mode: 'oneshot', deleteAfterSuccess: true, exec })

call('VmSpec: layers are built once, the leaf is done in each VM', async (y) => {
  const spec = () => new y.sdk.VmSpec()
    .additionalFiles({ [y.path('layer.txt')]: { content: 'layer\n' } })
    .systemdService(setup('count', `echo built >> ${y.path('count')}`))
    .snapshot()
    .workdir(y.dir)
  const first = await y.fs.vms.create({ spec: spec() })
  const second = await y.fs.vms.create({ spec: spec() })
  assert.equal((await first.vm.exec('cat layer.txt')).stdout, 'layer\n')
  assert.equal((await second.vm.exec('cat count')).stdout, 'built\n')
  y.built = first.vm
  await second.vm.delete()
})

call('snapshots.ensure', async (y) => {
  const wanted = () => ({ spec: new y.sdk.VmSpec().additionalFiles({ [y.path('ensured')]: { content: 'x' } }) })
  const { snapshotId } = await y.fs.vms.snapshots.ensure(wanted())
  assert.match(snapshotId, /^sc-/)
  assert.equal((await y.fs.vms.snapshots.ensure(wanted())).snapshotId, snapshotId)
  const { vm } = await y.fs.vms.create({ snapshotId })
  await vm.delete()
})

call('snapshots.ensure: a name goes with what it was last given to', async (y) => {
  const name = `named-${process.pid}`
  const spec = (content) => new y.sdk.VmSpec().additionalFiles({ [y.path('named')]: { content } })
  const first = await y.fs.vms.snapshots.ensure({ name, spec: spec('1') })
  const second = await y.fs.vms.snapshots.ensure({ name, spec: spec('2') })
  assert.notEqual(second.snapshotId, first.snapshotId)
  const { vm } = await y.fs.vms.create({ snapshotId: name })
  assert.equal((await vm.exec(`cat ${y.path('named')}`)).stdout, '2')
  await vm.delete()
  await fails('CREATE_SNAPSHOT_BAD_REQUEST', () => y.fs.vms.snapshots.ensure({ name: 'a/b', spec: spec('3') }))
})

call('snapshot.getBuild', async (y) => {
  const spec = new y.sdk.VmSpec().additionalFiles({ [y.path('ensured')]: { content: 'x' } })
  const { snapshotId } = await y.fs.vms.snapshots.ensure({ spec })
  const build = await y.fs.vms.snapshots.ref({ snapshotId }).getBuild()
  assert.equal((await build.wait({ timeoutMs: 10_000 })).state, 'succeeded')
  assert.equal(await build.failedPhase(), null)
  const row = await y.fs.vms.snapshots.get({ snapshotId })
  assert.equal(row.templateHash, (await build.get()).templateHash)
}, { since: '0.1.52' })

call('build.failedPhase', async (y) => {
  const broken = new y.sdk.VmSpec().systemdService(setup('never', `exit ${process.pid % 200 + 1}`))
  for (const spec of [broken, broken.snapshot()]) { // in the VM, and in a layer
    const { body } = await fails('VM_SETUP_FAILED', () => y.fs.vms.create({ spec }))
    const snapshot = y.fs.vms.snapshots.ref({ snapshotId: body.snapshotId })
    const row = await snapshot.get()
    assert.deepEqual([row.state, row.failed], ['failed', true])
    assert.match(row.failureReason, /never|exit/)
    const build = await snapshot.getBuild()
    assert.equal((await build.wait()).state, 'failed')
    assert.equal((await build.failedPhase()).snapshotId, body.snapshotId)
    const there = async (options) => (await y.fs.vms.snapshots.list(options)).snapshots.some((one) => one.snapshotId === body.snapshotId)
    assert.deepEqual([await there(), await there({ includeFailed: false })], [true, false])
    await snapshot.delete?.()
  }
}, { since: '0.1.52' })

call('snapshots.create: template', async (y) => {
  const template = new y.sdk.VmTemplate({ additionalFiles: { [y.path('template')]: { content: 'x' } } })
  assert.match((await y.fs.vms.snapshots.create({ template })).snapshotId, /^sc-/)
})

call('VmSpec: a step that fails', async (y) => {
  const spec = new y.sdk.VmSpec().systemdService(setup('broken', 'echo told >&2; exit 7'))
  const error = await fails('VM_SETUP_FAILED', () => y.fs.vms.create({ spec }))
  assert.match(error.body.snapshotId, /^sc-/)
  assert(JSON.stringify(error.body.diagnostics).includes('told'))
})

call('VmSpec: what cannot be', async (y) => {
  const image = new y.sdk.VmBaseImage().from('FROM debian\nCOPY here there')
  await fails('CREATE_VM_BAD_REQUEST', () => y.fs.vms.create({ spec: new y.sdk.VmSpec().baseImage(image) }))
})

call('vm.getBuild', async (y) => {
  const build = await y.built.getBuild()
  assert.equal((build.state ? build : await build.get()).state, 'succeeded')
}, { since: '0.1.52' })

call('build.get, phases', async (y) => {
  const build = await y.built.getBuild()
  assert.equal((await build.get()).buildId, build.buildId)
  assert.match((await build.phases())[0].phaseId, /^bph-/)
}, { since: '0.1.52' })

call('VmSpec.vcpuCount, memSizeGb, rootfsSizeGb', async (y) => {
  const { vm, vmId } = await y.fs.vms.create({ spec: new y.sdk.VmSpec().vcpuCount(2).memSizeGb(1).rootfsSizeGb(10) })
  const row = (await y.fs.vms.list()).vms.find((one) => one.id === vmId)
  assert.deepEqual(row.sizing, { vcpuCount: 2, memSizeMib: 1024, rootfsSizeMb: 10240 })
  await vm.delete()
})

call('VmSpec.memSizeGb: what cannot be', async (y) => {
  const of = (spec) => () => y.fs.vms.create({ spec })
  await fails('CREATE_VM_MEM_NOT_POWER_OF_TWO', of(new y.sdk.VmSpec().memSizeGb(3)))
  await fails('CREATE_VM_VCPU_OUT_OF_RANGE', of(new y.sdk.VmSpec().vcpuCount(64)))
}, { since: '0.1.49' })

call('vms.get: spec', async (y) => {
  const made = await y.fs.vms.create({ spec: new y.sdk.VmSpec().workdir(y.dir) })
  const { vm } = await y.fs.vms.get({ vmId: made.vmId, spec: new y.sdk.VmSpec().workdir(y.dir) })
  assert.equal((await vm.exec('pwd')).stdout, `${y.dir}\n`)
  await vm.delete()
})

call('VmSpec.discriminator, skipCache', async (y) => {
  const layer = () => new y.sdk.VmSpec().additionalFiles({ [y.path('same')]: { content: 'x' } })
  const of = async (spec) => (await y.fs.vms.snapshots.ensure({ spec })).snapshotId
  const first = await of(layer())
  assert.equal(await of(layer()), first)
  assert.notEqual(await of(layer().discriminator('another')), first)
  const anew = await of(layer().skipCache())
  assert.notEqual(anew, first)
  assert.equal(await of(layer()), anew)
})

call('VmSpec.snapshotId', async (y) => {
  const { snapshotId } = await y.fs.vms.snapshots.ensure({
    spec: new y.sdk.VmSpec().additionalFiles({ [y.path('below')]: { content: 'below\n' } }),
  })
  const { vm } = await y.fs.vms.create({ spec: new y.sdk.VmSpec().snapshotId(snapshotId).workdir(y.dir) })
  assert.equal((await vm.exec('cat below; pwd')).stdout, `below\n${y.dir}\n`)
  await vm.delete()
}, { since: '0.1.63' })

call('vm.delete: of a VM of a spec', async (y) => {
  await y.built.delete()
})
