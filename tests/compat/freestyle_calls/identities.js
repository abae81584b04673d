// Identities, tokens and permissions.
import { assert, call, fails } from './registry.js'

call('identities.create', async (y) => {
  const { identityId, identity } = await y.fs.identities.create()
  assert.match(identityId, /./)
  y.identity = identity
})

call('identities.list', async (y) => {
  const found = await y.fs.identities.list()
  assert(found.identities.some((one) => one.id === y.identity.identityId && one.managed === false))
})

call('identities.ref', async (y) => {
  assert.equal(y.fs.identities.ref({ identityId: y.identity.identityId }).identityId, y.identity.identityId)
})

call('tokens.create', async (y) => {
  const { tokenId, token } = await y.identity.tokens.create()
  ;[y.tokenId, y.token] = [tokenId, token]
  y.agent = new y.sdk.Freestyle({ accessToken: token })
})

call('tokens.list', async (y) => {
  assert.deepEqual((await y.identity.tokens.list()).tokens.map((one) => one.id), [y.tokenId])
})

call('new Freestyle: accessToken', async (y) => {
  await fails('FORBIDDEN', () => y.agent.vms.list())
  await fails('REPO_NOT_FOUND', () => y.agent.git.repos.ref({ repoId: y.repoId }).branches.list())
})

call('permissions.git.grant', async (y) => {
  await y.identity.permissions.git.grant({ repoId: y.repoId, permission: 'read' })
  const repo = y.agent.git.repos.ref({ repoId: y.repoId })
  assert.equal((await repo.branches.list()).branches.length, 2)
  await fails('FORBIDDEN', () => repo.commits.create({ message: 'x', branch: 'main', files: [{ path: 'x', content: 'x' }] }))
})

call('permissions.git.grant: twice', async (y) => {
  await fails('PERMISSION_ALREADY_EXISTS', () => y.identity.permissions.git.grant({ repoId: y.repoId, permission: 'read' }))
})

call('permissions.git.get', async (y) => {
  assert.equal((await y.identity.permissions.git.get({ repoId: y.repoId })).accessLevel, 'read')
})

call('permissions.git.update', async (y) => {
  await y.identity.permissions.git.update({ repoId: y.repoId, permission: 'write' })
  const repo = y.agent.git.repos.ref({ repoId: y.repoId })
  await repo.commits.create({ message: 'By the agent', branch: 'agent', files: [{ path: 'x', content: 'x' }] })
})

call('permissions.git.list', async (y) => {
  const { repositories } = await y.identity.permissions.git.list()
  assert.deepEqual(repositories.map((one) => [one.id, one.permissions]), [[y.repoId, 'write']])
})

call('permissions.git.list: in pages', async (y) => {
  const { repoId } = await y.fs.git.repos.create({})
  await y.identity.permissions.git.grant({ repoId, permission: 'read' })
  const page = async (cursor) => (await y.identity.permissions.git.list({ limit: 1, cursor })).repositories.map((one) => one.id)
  const found = [...await page(), ...await page('1'), ...await page('2')]
  assert.deepEqual(found.sort(), [y.repoId, repoId].sort())
  await y.fs.git.repos.delete({ repoId })
})

call('permissions.git.revoke', async (y) => {
  await y.identity.permissions.git.revoke({ repoId: y.repoId })
  await fails('PERMISSION_NOT_FOUND', () => y.identity.permissions.git.get({ repoId: y.repoId }))
  await fails('REPO_NOT_FOUND', () => y.agent.git.repos.ref({ repoId: y.repoId }).branches.list())
})

call('permissions.vms.grant', async (y) => {
  await y.identity.permissions.vms.grant({ vmId: y.vmId, allowedUsers: ['root'] })
  assert.equal((await y.agent.vms.ref({ vmId: y.vmId }).exec('echo granted')).stdout, 'granted\n')
  await fails('FORBIDDEN', () => y.agent.vms.ref({ vmId: y.vmId }).delete())
})

call('permissions.vms.get', async (y) => {
  const found = await y.identity.permissions.vms.get({ vmId: y.vmId })
  assert.deepEqual([found.vmId, found.allowedUsers], [y.vmId, ['root']])
})

call('permissions.vms.update', async (y) => {
  await y.identity.permissions.vms.update({ vmId: y.vmId, allowedUsers: ['somebody'] })
  await fails('FORBIDDEN', () => y.agent.vms.ref({ vmId: y.vmId }).exec('true'))
})

call('permissions.vms.list', async (y) => {
  assert.deepEqual((await y.identity.permissions.vms.list()).permissions.map((one) => one.vmId), [y.vmId])
})

call('permissions.vms.revoke', async (y) => {
  await y.identity.permissions.vms.revoke({ vmId: y.vmId })
  await fails('VM_NOT_FOUND', () => y.agent.vms.ref({ vmId: y.vmId }).exec('true'))
})

call('tokens.revoke', async (y) => {
  await y.identity.tokens.revoke({ tokenId: y.tokenId })
  await fails('UNAUTHORIZED', () => y.agent.vms.ref({ vmId: y.vmId }).getInfo())
})

call('identities.delete', async (y) => {
  await y.fs.identities.delete({ identityId: y.identity.identityId })
  await fails('IDENTITY_NOT_FOUND', () => y.identity.tokens.list())
})

call('git.repos.delete', async (y) => {
  await y.fs.git.repos.delete({ repoId: y.repoId })
  await y.fs.git.repos.delete({ repoId: y.imported.repoId })
  await fails('REPO_NOT_FOUND', () => y.repo.branches.list())
})
