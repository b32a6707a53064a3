# Carries connections at 127.0.0.1:PORT of a sandbox to TARGET: perl -e TEXT TARGET PORT.
#
# TARGET is the path of a unix socket, or http://HOST:PORT. As forwarder.py, for images without Python; modules of Debian's
# perl-base only.
use strict;
use warnings;
use Errno qw(EAGAIN EWOULDBLOCK EINTR EINPROGRESS EADDRINUSE);
use Fcntl qw(F_GETFL F_SETFL O_NONBLOCK);
use IO::Select;
use Socket;

my ($target, $port) = @ARGV;
my ($CHUNK, $LIMIT, $PATIENCE_S) = (32768, 65536, 5);
my $AWAY = '{"type":"error","error":{"type":"overloaded_error","code":"no_gateway","param":null,'
    . '"message":"the gateway cannot be reached from this sandbox; the same request may be fine in a moment"}}';
my $REFUSAL = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
    . "Connection: close\r\nContent-Length: " . length($AWAY) . "\r\n\r\n$AWAY";
my ($host, $name, $gateway_port);
if ($target =~ m{^https://}) {
    syswrite(STDERR, "the gateway is behind https, for which this image needs python3\n");
    exit 1;
}
if ($target =~ m{^http://([^/]+)}) {
    $name = $1;
    ($host, $gateway_port) = $name =~ m{^(.*):(\d+)$} ? ($1, $2) : ($name, 80);
}
$SIG{PIPE} = 'IGNORE';

socket(my $listener, PF_INET, SOCK_STREAM, 0) or die "socket: $!\n";
setsockopt($listener, SOL_SOCKET, SO_REUSEADDR, 1);
unless (bind($listener, sockaddr_in($port, INADDR_LOOPBACK)) && listen($listener, 512)) {
    my $busy = $! == EADDRINUSE;
    syswrite(STDERR, "port $port of 127.0.0.1: $!\n");
    exit($busy ? 0 : 1);
}
unblock($listener);
syswrite(STDOUT, "listening\n");

# An end: {sock, out: bytes that wait, ended: said all, shut: told that there is no more, other}. An agent's has besides,
# until it has reached the target: {since, head, lost}.
my %ends;
my ($readers, $writers) = (IO::Select->new($listener), IO::Select->new);
while (1) {
    my $wait = (grep { $_->{since} } values %ends) ? 0.2 : undef;
    my ($can_read, $can_write) = IO::Select::select($readers, $writers, undef, $wait);
    for my $sock (@{ $can_read || [] }, @{ $can_write || [] }) {
        if ($sock == $listener) { take(); next }
        my $end = $ends{ fileno($sock) // -1 } or next;
        $end->{since} ? hear($end) : carry($end);
    }
    for my $end (grep { $_->{since} } values %ends) { reach($end) }
}

sub unblock { my ($sock) = @_; fcntl($sock, F_SETFL, fcntl($sock, F_GETFL, 0) | O_NONBLOCK) }

sub waits { return $! == EAGAIN || $! == EWOULDBLOCK || $! == EINTR }

sub take {
    accept(my $sock, $listener) or return;
    unblock($sock);
    setsockopt($sock, Socket::IPPROTO_TCP, Socket::TCP_NODELAY, 1);
    my $end = { sock => $sock, out => '', head => '', since => time };
    $ends{ fileno $sock } = $end;
    # Towards a URL the head of the request comes first, since its Host is rewritten.
    $readers->add($sock) if $name;
}

sub hear {
    my ($end) = @_;
    my $got = sysread($end->{sock}, $end->{head}, $CHUNK, length $end->{head});
    return if !defined $got && waits();
    return drop($end) if !$end->{lost} && (!$got || length $end->{head} > 4 * $LIMIT);
    $readers->remove($end->{sock}) if $end->{head} =~ /\r\n\r\n/;
    if ($end->{lost}) {
        syswrite($end->{sock}, $REFUSAL);
        shutdown($end->{sock}, 1);
        # Closing with bytes unread would take the answer back.
        sysread($end->{sock}, my $rest, $CHUNK);
        drop($end);
    }
}

sub reach {
    my ($end) = @_;
    return if $end->{lost} || ($name && $end->{head} !~ /\r\n\r\n/);
    my $sock = target();
    if (!$sock) {
        return if time - $end->{since} < $PATIENCE_S;
        $end->{lost} = 1;
        $end->{head} = '';
        $readers->add($end->{sock});
        return;
    }
    unblock($sock);
    my $gateway = { sock => $sock, out => named($end->{head}), other => $end };
    $end->{other} = $gateway;
    $end->{since} = 0;
    $ends{ fileno $sock } = $gateway;
    carry($end);
}

sub target {
    my $sock;
    if (!$host) {
        socket($sock, PF_UNIX, SOCK_STREAM, 0) or return;
        return connect($sock, sockaddr_un($target)) ? $sock : undef;
    }
    my $address = inet_aton($host) or return;
    socket($sock, PF_INET, SOCK_STREAM, 0) or return;
    setsockopt($sock, SOL_SOCKET, SO_KEEPALIVE, 1);
    return connect($sock, sockaddr_in($gateway_port, $address)) ? $sock : undef;
}

sub named {
    my ($data) = @_;
    return '' unless $name;
    my ($lines, $body) = split /\r\n\r\n/, $data, 2;
    my ($first, @rest) = split /\r\n/, $lines;
    @rest = grep { !/^(host|connection):/i } @rest;
    return join("\r\n", $first, "Host: $name", 'Connection: close', @rest) . "\r\n\r\n" . ($body // '');
}

sub carry {
    my ($end) = @_;
    # Copies: what is dropped forgets its other.
    my @both = ($end, $end->{other});
    for my $each (@both) {
        return drop($end) unless fill($each) && flush($each) && flush($each->{other});
    }
    return drop($end) if $end->{shut} && $end->{other}{shut};
    for my $each (@both) {
        my $hungry = !$each->{ended} && length $each->{other}{out} < $LIMIT;
        $hungry ? $readers->add($each->{sock}) : $readers->remove($each->{sock});
        length $each->{out} ? $writers->add($each->{sock}) : $writers->remove($each->{sock});
    }
}

sub fill {
    my ($end) = @_;
    while (!$end->{ended} && length $end->{other}{out} < $LIMIT) {
        my $got = sysread($end->{sock}, $end->{other}{out}, $CHUNK, length $end->{other}{out});
        return waits() unless defined $got;
        $end->{ended} = 1 unless $got;
    }
    return 1;
}

sub flush {
    my ($end) = @_;
    while (length $end->{out}) {
        my $sent = syswrite($end->{sock}, $end->{out});
        return waits() unless defined $sent;
        substr($end->{out}, 0, $sent, '');
    }
    if ($end->{other}{ended} && !$end->{shut}) {
        $end->{shut} = 1;
        shutdown($end->{sock}, 1);
    }
    return 1;
}

sub drop {
    my ($end) = @_;
    my @both = grep { $_ } $end, $end->{other};
    for my $each (@both) {
        $readers->remove($each->{sock});
        $writers->remove($each->{sock});
        delete $ends{ fileno $each->{sock} };
        close $each->{sock};
        delete $each->{other};
    }
}
