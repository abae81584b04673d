# /etc/profile sets PATH anew in every login shell, so the one of /etc/environment must be put back.
PATH=/opt/python/bin:/opt/node/bin:/opt/bun/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ "$(id -u)" -ne 0 ] && [ -d "$HOME/.local/bin" ]; then
    PATH="$HOME/.local/bin:$PATH"
fi
export PATH
