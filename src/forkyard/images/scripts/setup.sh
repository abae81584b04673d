#!/bin/sh
# Runs once inside the new root, when all packages and files are in place.
set -eu

useradd --uid 1000 --user-group --create-home --shell /bin/bash user
passwd --quiet --lock root
for file in .bashrc .yarnrc.yml .bunfig.toml; do
    [ ! -e "/etc/skel/$file" ] || cp "/etc/skel/$file" /root/
done
chmod 0440 /etc/sudoers.d/forkyard
visudo --check --quiet
update-ca-certificates >/dev/null
rm -f /etc/ssh/ssh_host_*

systemctl --quiet enable ssh.service forkyard-milestone-sshd.service
# A sandbox sleeps and wakes: timers would all fire at every wake, and cleaners would delete files that are old only by the
# host's clock.
systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer
# Nobody sits at a console, and the serial one is the host's log: no login there.
systemctl --quiet mask getty.target console-getty.service getty@.service serial-getty@.service
mkdir -p /etc/systemd/system-generators
ln -s /dev/null /etc/systemd/system-generators/systemd-getty-generator
# Saved state of hardware that is not there, or that every sandbox gets anew.
systemctl --quiet mask systemd-random-seed.service systemd-pstore.service systemd-rfkill.service \
    systemd-backlight@.service systemd-update-utmp.service systemd-update-utmp-runlevel.service

find /var/log -type f -delete
# What mmdebstrap wrote for the build alone; it may name proxies and addresses with credentials.
rm -rf /boot/* /etc/apt/apt.conf.d/99mmdebstrap /etc/apt/sources.list.d/*
