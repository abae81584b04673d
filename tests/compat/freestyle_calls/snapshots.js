// Snapshots of VMs.
import { assert, call, fails } from './registry.js'

call('vm.snapshot', async (y) => {
  const made = await y.vm.snapshot({ name: `snap-${process.pid}` })
  assert.match(made.snapshotId, /^sc-[a-z0-9]{20}$/)
  assert.equal(made.sourceVmId, y.vmId)
  y.snapshotId = made.snapshotId
})

call('snapshots.list', async (y) => {
  const found = await y.fs.vms.snapshots.list()
  const one = found.snapshots.find((snapshot) => snapshot.snapshotId === y.snapshotId)
  assert.deepEqual([one.name, one.state, one.sourceVmId], [`snap-${process.pid}`, 'ready', y.vmId])
  assert(found.readyCount >= 1)
}, { since: '0.1.52' })

call('snapshots.get', async (y) => {
  const found = await y.fs.vms.snapshots.get({ snapshotId: y.snapshotId })
  assert.deepEqual([found.snapshotId, found.state, found.sourceVmId], [y.snapshotId, 'ready', y.vmId])
}, { since: '0.1.52' })

call('snapshots.get: unknown', async (y) => {
  await fails('404', () => y.fs.vms.snapshots.get({ snapshotId: 'sc-' + '0'.repeat(20) }))
}, { since: '0.1.52' })

call('snapshots.ref', async (y) => {
  assert(y.fs.vms.snapshots.ref({ snapshotId: y.snapshotId }))
}, { since: '0.1.52' })

call('snapshot.update', async (y) => {
  const snapshot = y.fs.vms.snapshots.ref({ snapshotId: y.snapshotId })
  await snapshot.update({ name: `renamed-${process.pid}` })
  const found = (await y.fs.vms.snapshots.list()).snapshots.find((one) => one.snapshotId === y.snapshotId)
  assert.equal(found.name, `renamed-${process.pid}`)
}, { since: '0.1.63' })

call('snapshot.get', async (y) => {
  const snapshot = y.fs.vms.snapshots.ref({ snapshotId: y.snapshotId })
  assert.equal((await snapshot.get()).state, 'ready')
}, { since: '0.1.52' })

call('vms.create: snapshotId', async (y) => {
  const { vm } = await y.fs.vms.create({ snapshotId: y.snapshotId })
  assert.equal((await vm.exec('pwd')).stdout, `${y.dir}\n`)
  await vm.delete()
})

call('vms.create: snapshotId, sizes', async (y) => {
  const { vm, vmId } = await y.fs.vms.create({ snapshotId: y.snapshotId, vcpuCount: 2, memSizeGb: 1, rootfsSizeGb: 20 })
  const row = (await y.fs.vms.list()).vms.find((one) => one.id === vmId)
  assert.deepEqual(row.sizing, { vcpuCount: 2, memSizeMib: 1024, rootfsSizeMb: 20480 })
  assert.deepEqual([row.state, row.persistence.type], ['running', 'sticky'])
  assert.equal((await vm.exec('echo here')).stdout, 'here\n')
  await vm.delete()
  await fails('CREATE_VM_BAD_REQUEST', () => y.fs.vms.create({ snapshotId: y.snapshotId, rootfsSizeGb: 4 }))
})

call('snapshots.delete', async (y) => {
  await y.fs.vms.snapshots.delete({ snapshotId: y.snapshotId })
  await fails('SNAPSHOT_NOT_FOUND', () => y.fs.vms.create({ snapshotId: y.snapshotId }))
  await fails('SNAPSHOT_ALREADY_DELETED', () => y.fs.vms.snapshots.delete({ snapshotId: y.snapshotId }))
  await fails('SNAPSHOT_NOT_FOUND', () => y.fs.vms.snapshots.delete({ snapshotId: 'sc-' + '0'.repeat(20) }))
})
