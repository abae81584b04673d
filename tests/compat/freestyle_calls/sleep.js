// Sleep, power, forks.
import { assert, call, fails, until } from './registry.js'

call('vm.suspend', async (y) => {
  const told = await y.vm.suspend()
  assert.equal(told.id, y.vmId)
  assert.equal((await y.vm.getInfo()).state, 'suspended')
})

call('vm.exec: wakes a suspended VM', async (y) => {
  assert.equal((await y.vm.exec('echo awake')).stdout, 'awake\n')
  assert.equal((await y.vm.getInfo()).state, 'running')
})

call('vm.start: resumes', async (y) => {
  await y.vm.suspend()
  assert.equal((await y.vm.start()).id, y.vmId)
  assert.equal((await y.vm.getInfo()).state, 'running')
})

call('pty.attach: a session outlives a suspend', async (y) => {
  const seen = { before: '', after: '' }
  const session = await y.vm.pty.open({
    exec: 'echo begun; while read line; do echo got $line; done',
    onData: (data) => { seen.before += Buffer.from(data).toString() },
  })
  await until(() => seen.before.includes('begun'))
  session.detach()
  await y.vm.suspend()
  const again = await y.vm.pty.attach({
    sessionId: session.sessionId,
    onData: (data) => { seen.after += Buffer.from(data).toString() },
  })
  again.write('me\n')
  await until(() => seen.after.includes('begun') && seen.after.includes('got me'), 60)
  again.detach()
  await y.vm.pty.close({ sessionId: session.sessionId })
}, { since: '0.1.63' })

call('pty.attach: a session goes on in a fork', async (y) => {
  const seen = { parent: '', child: '' }
  const into = (name) => (data) => { seen[name] += Buffer.from(data).toString() }
  const exec = 'n=0; while read line; do n=$((n + 1)); echo $line-$n; done'
  const session = await y.vm.pty.open({ exec, sessionId: 'counts', onData: into('parent') })
  session.write('one\n')
  await until(() => seen.parent.includes('one-1'), 30)
  const { forks } = await y.vm.fork({ count: 1 })
  const child = forks[0].vm
  assert((await child.pty.list()).sessions.some((one) => one.sessionId === 'counts' && one.running))
  const other = await child.pty.attach({ sessionId: 'counts', onData: into('child') })
  other.write('two\n')
  await until(() => seen.child.includes('one-1') && seen.child.includes('two-2'), 30)
  session.write('three\n')
  await until(() => seen.parent.includes('three-2'), 30)
  assert(!seen.parent.includes('two') && !seen.child.includes('three'))
  for (const one of [session, other]) one.detach()
  for (const vm of [child, y.vm]) await vm.pty.close({ sessionId: 'counts' })
  await child.delete()
}, { since: '0.1.63', vm: true })

call('pty: a session whose VM is deleted ends for its client', async (y) => {
  const { vm } = await y.fs.vms.create()
  const ends = []
  await vm.pty.open({ exec: 'sleep 600', reconnect: false, onClose: (end) => ends.push(end) })
  await vm.delete()
  await until(() => ends.length > 0, 60)
  assert.equal(ends[0].code, 1011)
  assert.match(ends[0].reason, /has ended/)
}, { since: '0.1.63' })

call('vm.fork', async (y) => {
  const { forks } = await y.vm.fork()
  assert.equal(forks.length, 1)
  assert.equal((await forks[0].vm.exec('echo fork')).stdout, 'fork\n')
  await forks[0].vm.delete()
})

call('vm.fork: count', async (y) => {
  const { forks } = await y.vm.fork({ count: 3 })
  assert.equal(new Set(forks.map((one) => one.vmId)).size, 3)
  const done = await Promise.all(forks.map(({ vm }, n) => vm.exec(`echo ${n}`)))
  assert.deepEqual(done.map((one) => one.stdout), ['0\n', '1\n', '2\n'])
  await Promise.all(forks.map(({ vm }) => vm.delete()))
})

call('vm.fork: unknown VM', async (y) => {
  await fails('FORK_VM_NOT_FOUND', () => y.fs.vms.ref({ vmId: 'i' + '0'.repeat(19) }).fork())
})

call('vm.stop', async (y) => {
  const { vm, vmId } = await y.fs.vms.create()
  assert.equal((await vm.stop()).vmId, vmId)
  assert.equal((await vm.getInfo()).state, 'stopped')
  await fails('VM_NOT_RUNNING', () => vm.stop())
  y.stopped = vm
})

call('vm.start: boots', async (y) => {
  await y.stopped.start({ idleTimeoutSeconds: 900 })
  assert.equal((await y.stopped.exec('echo booted')).stdout, 'booted\n')
})

call('vm.resize', async (y) => {
  await y.stopped.resize(
    y.newerThan('0.1.62') ? { storage: 12 } : { rootfsSizeGb: 12 },
  )
  const row = (await y.fs.vms.list()).vms.find((one) => one.id === y.stopped.vmId)
  assert.equal(row.sizing.rootfsSizeMb, 12 * 1024)
  assert.equal((await y.stopped.getInfo()).state, 'running')
}, { since: '0.1.49' })

call('vm.waitForExit', async (y) => {
  const exited = y.stopped.waitForExit()
  await y.stopped.stop()
  assert.match((await exited).exitStatus, /./)
}, { since: '0.1.49' })

call('vm.kill', async (y) => {
  await y.stopped.start()
  await y.stopped.kill()
  assert.equal((await y.stopped.getInfo()).state, 'stopped')
  await y.stopped.delete()
})

call('vm.optimize', async (y) => {
  assert.equal((await y.vm.optimize()).id, y.vmId)
  assert.equal((await y.vm.exec('echo again')).stdout, 'again\n')
}, { since: '0.1.49' })
