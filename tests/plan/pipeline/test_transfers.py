"""Messages of all tables: both ends of a channel agree on their order, and nobody waits in vain."""

import functools

import pytest

from graphmoe.plan.pipeline import Placement, parts
from graphmoe.plan.pipeline.check import needs, result
from graphmoe.plan.pipeline.schedules import SCHEDULES, make_table
from graphmoe.plan.pipeline.schedules.one_f_one_b import forward_only
from graphmoe.plan.pipeline.transfers import HELD, channels_of, moments_of, transfers_of

TRAINING = [(name, schedule.virtual_stages[0]) for name, schedule in SCHEDULES.items()]
TRAINING += [("interleaved", 3)]
PLACEMENTS = [functools.partial(Placement.loop, virtual_stages=v) for v in (1, 2, 3)] + [Placement.folded]
SIZES = [(ranks, number) for ranks in (1, 2, 3, 4, 7) for number in (1, 2, 5, 8, 13)]


def tables():
    for size in SIZES:
        for name, virtual in TRAINING:
            yield make_table(name, *size, virtual)
        for name, virtual in (("1f1b", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2)):
            yield make_table(name, *size, virtual, overlap=True)
        for placed in PLACEMENTS:
            yield forward_only(placed(size[0]), size[1])


TABLES = list(tables())


@pytest.fixture(scope="module")
def transfers():
    return [(table, [transfers_of(table, rank) for rank in range(len(table.ranks))]) for table in TABLES]


def read_at(table, rank):
    placement = table.placement
    return {
        need: time
        for time, step in enumerate(table.ranks[rank])
        for action in parts(step)
        for need in needs(action, placement.num_stages)
        if placement.rank_of[need.stage] != rank
    }


def times(table, rank, by_step):
    return {message: t for t, step in enumerate(table.ranks[rank]) for message in by_step.get(step, ())}


def test_both_ends_of_a_channel_have_its_messages_in_one_order_each_once(transfers):
    for table, of_ranks in transfers:
        sent, posted = ({channel: [] for channel in channels_of(table)} for _ in range(2))
        for of_rank, steps in zip(of_ranks, table.ranks, strict=True):
            for step in steps:
                for message in filter(None, (of_rank.sends.get(result(action)) for action in parts(step))):
                    sent[message.channel].append(message.content)
                for message in of_rank.posts.get(step, ()):
                    posted[message.channel].append(message.content)
        assert sent == posted
        assert all(len(set(contents)) == len(contents) > 0 for contents in sent.values())


def test_ranks_receive_what_steps_read_no_earlier_than_needed(transfers):
    for table, of_ranks in transfers:
        for rank, of_rank in enumerate(of_ranks):
            posts, read = times(table, rank, of_rank.posts), read_at(table, rank)
            assert {message.content for message in posts} == {*read}
            assert all(message.destination == rank != message.source for message in posts)
            for channel in channels_of(table):
                own = [message for message in posts if message.channel == channel]
                for place, message in enumerate(own):
                    assert posts[message] <= read[message.content]
                    if posts[message] < read[message.content]:
                        assert posts[own[place + 1]] == posts[message]


def test_a_message_is_over_when_its_reader_has_led_to_something_that_came_back(transfers):
    for table, of_ranks in transfers:
        if table.placement.num_ranks > 4 or table.schedule == "forward_only":
            continue
        before = steps_before(table)
        for rank, of_rank in enumerate(of_ranks):
            for message, time in times(table, rank, of_rank.over).items():
                reader = read_at(table, message.destination)[message.content]
                assert (message.destination, reader) in before(rank, time)


def steps_before(table):
    """The steps of all ranks that are over when a step, by its rank and number, has its inputs."""
    numbered = [
        (rank, time, step) for rank, steps in enumerate(table.ranks) for time, step in enumerate(steps)
    ]
    made = {result(action): (rank, time) for rank, time, step in numbered for action in parts(step)}

    @functools.cache
    def before(rank, time):
        step = table.ranks[rank][time]
        direct = {made[n] for a in parts(step) for n in needs(a, table.placement.num_stages)}
        direct |= {(rank, time - 1)} if time else set()
        return direct.union(*(before(*one) for one in direct))

    return before


def test_no_rank_waits_in_vain_where_receives_releases_and_inputs_stop_the_host(transfers):
    for table, of_ranks in transfers:
        position, posted, made = [0] * len(table.ranks), set(), set()
        moved = True
        while moved:
            moved = False
            for rank, steps in enumerate(table.ranks):
                while position[rank] < len(steps):
                    step = steps[position[rank]]
                    posted |= {message.content for message in of_ranks[rank].posts.get(step, ())}
                    wanted = {n for a in parts(step) for n in needs(a, table.placement.num_stages)}
                    over = {message.content for message in of_ranks[rank].over.get(step, ())}
                    if not (wanted <= made and over <= posted):
                        break
                    made |= {result(action) for action in parts(step)}
                    position[rank] += 1
                    moved = True
        assert position == [len(steps) for steps in table.ranks], (table.schedule, len(position))


def test_sent_messages_are_held_for_a_while_only():
    evaluation = forward_only(Placement.loop(4), 16)
    for table, most in ((make_table("1f1b", 4, 16), [4, 4, 3, 2]), (evaluation, [HELD, HELD, HELD, 0])):
        assert [most_held(table, rank) for rank in range(4)] == most


def most_held(table, rank):
    of_rank, held, most = transfers_of(table, rank), set(), 0
    for step in table.ranks[rank]:
        held -= set(of_rank.over.get(step, ()))
        held |= {of_rank.sends[result(a)] for a in parts(step) if result(a) in of_rank.sends}
        most = max(most, len(held))
    return most


def test_a_table_that_evaluates_needs_no_channel_that_its_schedule_lacks():
    for table in TABLES:
        channels = set(channels_of(forward_only(table.placement, 4)))
        assert channels <= set(channels_of(table))
        assert bool(channels) == (table.placement.num_ranks > 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_moments_of_a_short_table_are_those_of_a_long_one_but_where_ranks_keep_all(name):
    for rank in range(4):
        short, long = (moments_of(make_table(name, 4, number), rank) for number in (17, 41))
        assert (short == long) != SCHEDULES[name].keeps_all
        assert moments_of(make_table(name, 4, 2), rank) != long
