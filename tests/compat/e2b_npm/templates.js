// Templates: built, found, tagged; and secrets.
import { assert, call, fails } from './registry.js'

// Once there were no tags, and a name was among the options.
const old = ({ Template }) => Template.exists === undefined
const named = (y, name, options = {}) => (old(y.e2b) ? [{ ...options, alias: name }] : [name, options])

call('Template.build, Sandbox.create(template)', async (y) => {
  y.template = `npm-${process.hrtime.bigint()}`
  const { Template } = y.e2b
  const wanted = Template()
    .fromBaseImage()
    .setWorkdir(y.dir)
    .setEnvs({ FROM_TEMPLATE: 'yes', ...y.envs })
    .runCmd('echo built as $FROM_TEMPLATE; pwd > built.txt')
  const logs = []
  const name = old(y.e2b) ? y.template : `${y.template}:v1`
  const onBuildLogs = (entry) => { logs.push(entry.message) }
  const built = await Template.build(wanted, ...named(y, name, { onBuildLogs }))
  assert(logs.some((line) => line.includes('built as yes')))
  assert(built === undefined || (built.templateId && built.buildId)) // nothing, once
  const made = await y.e2b.Sandbox.create(name, { timeoutMs: 300_000 })
  assert.equal((await made.commands.run('cat built.txt; echo $FROM_TEMPLATE')).stdout, `${y.dir}\nyes\n`)
  assert.notEqual(await made.kill(), false)
})

call('Template.build: a step that fails', async (y) => {
  const { Template } = y.e2b
  const wanted = Template().fromBaseImage().runCmd('echo about to fail; exit 3')
  await fails(y.e2b.BuildError, () => Template.build(wanted, ...named(y, `${y.template}-fails`)))
})

call('Template.exists, assignTags, getTags, removeTags', async (y) => {
  const { Template } = y.e2b
  assert.equal(await Template.exists(y.template), true)
  assert.equal(await Template.exists(`${y.template}-nothing`), false)
  await Template.assignTags(`${y.template}:v1`, ['v2', 'newest'])
  assert.deepEqual((await Template.getTags(y.template)).map((one) => one.tag).sort(), ['newest', 'v1', 'v2'])
  await Template.removeTags(y.template, 'v2')
  assert.deepEqual((await Template.getTags(y.template)).map((one) => one.tag).sort(), ['newest', 'v1'])
}, { since: '2.51' })

call('Template.buildInBackground, getBuildStatus', async (y) => {
  const { Template } = y.e2b
  const begun = await Template.buildInBackground(Template().fromNodeImage().runCmd('true'), ...named(y, `${y.template}-later`))
  let status
  for (let n = 0; n < 600 && !['ready', 'error'].includes(status?.status); n++) {
    status = await Template.getBuildStatus(begun)
    await new Promise((done) => setTimeout(done, 100))
  }
  assert.equal(status.status, 'ready')
})

call('Secret.create, getInfo, update, list, exists, destroy', async (y) => {
  const { Secret } = y.e2b
  const name = `secret-${process.hrtime.bigint()}`
  assert.equal((await Secret.create(name, 'first', { metadata: { team: 'a' } })).name, name)
  assert.deepEqual((await Secret.update(name, 'second')).metadata, { team: 'a' })
  assert.equal((await Secret.getInfo(name)).name, name)
  assert((await Secret.list().nextItems()).some((one) => one.name === name))
  assert.equal(await Secret.exists(name), true)
  assert.equal(await Secret.destroy(name), true)
  assert.equal(await Secret.destroy(name), false)
}, { since: '2.51' })
