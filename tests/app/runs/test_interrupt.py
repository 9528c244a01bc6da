import signal
import threading

import pytest

from dpbam.app.runs.run import graceful


@pytest.fixture(autouse=True)
def _a_terminal():
    """Signals as at a terminal: a shell's background jobs ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_asks_and_the_second_acts():
    said = []
    before = signal.getsignal(signal.SIGINT)
    with graceful(said.append) as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert len(said) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), graceful(print):
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_cannot_set_handlers_and_do_not_try():
    results = []

    def work():
        with graceful(print) as stop:
            results.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False]
