// Scripts, schedules, logs; and what is not served.
import { assert, call, fails } from './registry.js'

const DOMAIN = `app-${process.pid}.example.com`

call('serverless.runs.create', async (y) => {
  const done = await y.fs.serverless.runs.create({
    code: `export default () => { console.log('working', { on: 'it' }); return { n: 6 * 7 } }`,
  })
  assert.deepEqual(done.result, { n: 42 })
  assert.deepEqual(done.logs, [{ type: 'log', message: "working { on: 'it' }" }])
})

call('serverless.runs.create: envVars, async', async (y) => {
  const done = await y.fs.serverless.runs.create({
    code: 'export default async () => { await new Promise((r) => setTimeout(r, 20)); return process.env.WHO }',
    envVars: { WHO: 'me' },
    timeout: 30,
  })
  assert.equal(done.result, 'me')
})

call('serverless.runs.create: an error', async (y) => {
  const error = await fails('RUNTIME_ERROR', () => y.fs.serverless.runs.create({ code: `export default () => { throw new Error('broken') }` }))
  assert.match(error.message, /broken/)
})

call('serverless.runs.create: no JavaScript', async (y) => {
  await fails('SYNTAX_ERROR', () => y.fs.serverless.runs.create({ code: 'export default (' }))
})

call('serverless.runs.list', async (y) => {
  const found = await y.fs.serverless.runs.list()
  assert(found.runs.length >= 4 && found.totalCount >= 4)
  assert(found.runs.every((one) => ['starting', 'running', 'complete'].includes(one.status)))
  y.runId = found.runs.at(-1).runId
})

call('serverless.runs.create: zeroRetention', async (y) => {
  const done = await y.fs.serverless.runs.create({ code: 'export default () => "told once"', zeroRetention: true })
  assert.equal(done.result, 'told once')
})

call('serverless.runs.getLogs', async (y) => {
  const { logs } = await y.fs.serverless.runs.getLogs({ runId: y.runId })
  assert.equal(logs[0].message, "working { on: 'it' }")
}, { since: '0.1.52' })

call('cron.schedule', async (y) => {
  const { job } = await y.fs.cron.schedule({
    name: 'every minute',
    cron: '* * * * *',
    run: { code: 'export default (payload) => payload' },
    payload: { a: 1 },
  })
  assert.deepEqual([job.schedule.active, job.schedule.timezone, job.schedule.payload], [true, 'UTC', { a: 1 }])
  y.job = job
}, { since: '0.1.63' })

call('cron.schedule: no cron expression', async (y) => {
  await fails('INVALID_REQUEST', () => y.fs.cron.schedule({ cron: 'now and then', run: { code: 'export default 1' } }))
}, { since: '0.1.63' })

call('cron.list', async (y) => {
  const { jobs } = await y.fs.cron.list()
  assert(jobs.some((one) => one.schedule.id === y.job?.schedule.id) || !y.newerThan('0.1.62'))
}, { since: '0.1.49' })

call('job.update', async (y) => {
  await y.job.update({ name: 'at noon', cron: '0 12 * * mon-fri', timezone: 'Europe/Berlin' })
  const found = (await y.fs.cron.list()).jobs.find((one) => one.schedule.id === y.job.schedule.id).schedule
  assert.deepEqual([found.name, found.cron, found.timezone], ['at noon', '0 12 * * mon-fri', 'Europe/Berlin'])
}, { since: '0.1.63' })

call('job.disable, enable', async (y) => {
  await y.job.disable()
  const active = async () => (await y.fs.cron.list()).jobs.find((one) => one.schedule.id === y.job.schedule.id).schedule.active
  assert.equal(await active(), false)
  await y.job.enable()
  assert.equal(await active(), true)
}, { since: '0.1.63' })

call('job.executions', async (y) => {
  assert.deepEqual((await y.job.executions()).executions, [])
}, { since: '0.1.63' })

call('job.successRate', async (y) => {
  const found = await y.job.successRate({ start: new Date(0), end: new Date() })
  assert.equal(found.total, 0)
}, { since: '0.1.63' })

call('vm.getLogs', async (y) => {
  const { logs } = await y.vm.getLogs()
  assert(logs.some((one) => one.message.includes('sandbox.running')))
}, { since: '0.1.52' })

call('observability.getLogs', async (y) => {
  const { logs } = await y.fs.observability.getLogs({ vmId: y.vmId, search: 'sandbox.creating', pageSize: 10 })
  assert(logs.every((one) => one.message.includes('sandbox.creating')))
}, { since: '0.1.52' })

call('observability.streamLogs', async (y) => {
  const stop = new AbortController()
  for await (const entry of y.fs.observability.streamLogs({ vmId: y.vmId, includeExisting: true, signal: stop.signal })) {
    assert(entry.message)
    stop.abort()
  }
}, { since: '0.1.52' })

call('observability.logs', async (y) => {
  const { logs } = await y.fs.observability.logs({ vmId: y.vmId, pageSize: 3 })
  assert(logs.length > 0 && logs.length <= 3)
}, { since: '0.1.52' })

call('cron.list: deploymentId', async (y) => {
  assert.deepEqual((await y.fs.cron.list({ deploymentId: 'nothing' })).jobs, [])
}, { since: '0.1.49' })

call('deployment.getLogs', async (y) => {
  const { logs } = await y.fs.serverless.deployments.ref({ deploymentId: 'x' }).getLogs()
  assert.deepEqual(logs, [])
}, { since: '0.1.52' })

// ── not served: an error that each client knows ──

call('serverless.deployments.create: not served', async (y) => {
  await fails('SERVICE_UNAVAILABLE', () => y.fs.serverless.deployments.create({ code: 'export default 1' }))
})

call('serverless.deployments.list: not served', async (y) => {
  await fails('SERVICE_UNAVAILABLE', () => y.fs.serverless.deployments.list())
})

call('dns.records.create: not served', async (y) => {
  await fails('SERVICE_UNAVAILABLE', () => y.fs.dns.records.create({ domain: DOMAIN, record: { kind: 'A' } }))
})

call('serverless.deployments.ref: not served', async (y) => {
  await fails('SERVICE_UNAVAILABLE', () => y.fs.serverless.deployments.ref({ deploymentId: 'x' }).getDetails())
})

call('deployment.fetch: not served', async (y) => {
  const answer = await y.fs.serverless.deployments.ref({ deploymentId: 'x' }).fetch('/api/hello')
  assert.equal(answer.status, 501)
  assert.equal((await answer.json()).code, 'SERVICE_UNAVAILABLE')
}, { since: '0.1.52' })

call('dns.records.list: not served', async (y) => {
  await fails('SERVICE_UNAVAILABLE', () => y.fs.dns.records.list({ domain: DOMAIN }))
})

call('vpc.configureWireGuardPeer: not served', async (y) => {
  const error = await y.fs.vpc.configureWireGuardPeer('x', { publicKey: 'x' }).catch((error) => error)
  assert.match(error.message, /SERVICE_UNAVAILABLE/)
}, { since: '0.1.63' })

call('vpc.create: not served', async (y) => {
  const error = await y.fs.vpc.create().catch((error) => error)
  assert.match(error.message, /SERVICE_UNAVAILABLE/)
}, { since: '0.1.63' })
