/* SPDX-License-Identifier: Apache-2.0
 *
 * One doorbell: a producer that publishes a word and then rings, a stream that waits for the bell in front of its wait
 * kernel, and a watchdog that opens the bell at any moment. The lane takes part in the first and the third step of the
 * consumer, not in the second. The producer may end at any point (CRASH).
 *
 * No ring is lost (everybody ends), and after a watchdog's opening the stream passes early in one exchange at most.
 */
#ifndef EXCHANGES
#define EXCHANGES 3     /* of a step */
#endif
#ifndef OPENINGS
#define OPENINGS 2      /* by the watchdog while nothing is wrong */
#endif
#ifndef CRASH
#define CRASH 0
#endif

#define OPEN 1                          /* bit of the waiting side; the rest is the ring */
#define RING(n) (2 * (n))
#ifdef OVERWRITES
#define OPENED OPEN                     /* a ring that has come already is lost */
#define IS_RUNG(n) ((bell & ~OPEN) == RING(n) || bell == OPEN)
#else
#define OPENED (bell | OPEN)
#define IS_RUNG(n) ((bell & ~OPEN) == RING(n))
#endif

byte bell = OPEN, word, reply, openings = OPENINGS;
byte quiet;                             /* exchanges passed since the watchdog last opened the bell */
bool aborted, producer_ended;

proctype Producer() {
  byte n = 1;
  do
  :: n > 2 * EXCHANGES -> break
  :: n <= 2 * EXCHANGES && reply == n - 1 ->
    word = n;                           /* published */
    bell = RING(n);                     /* and rung */
    n++
#if CRASH
  :: producer_ended = true; break
#endif
  od
}

inline enter(takes_part) {
  if
#ifdef ENTER_SILENCES
  :: takes_part -> bell = 0             /* forgets a ring that has come already */
#else
  :: takes_part -> bell = bell & ~OPEN
#endif
  :: else -> bell = bell | OPEN
  fi
}

inline exchange(takes_part) {
  bell > 0;                             /* the stream's wait */
  assert(!takes_part || aborted || quiet < 2 || word == n);
  if                                    /* the wait kernel */
  :: atomic { takes_part && !aborted && word == n &&
#ifdef WORD_ONLY
    true ->                             /* a ring that comes later lets the next exchange pass early, and so on */
#else
    IS_RUNG(n) ->
#endif
    bell = 0 }
    if :: quiet < 2 -> quiet++ :: else fi;
    reply = n; n++
  :: atomic { !takes_part -> bell = bell | OPEN }
  :: atomic { takes_part && aborted -> takes_part = false; bell = bell | OPEN }
  fi
}

proctype Consumer() {
  byte n = 1, step, x;
  bool takes_part;
  for (step : 0 .. 2) {
    takes_part = step != 1 && !aborted;
    enter(takes_part);
    for (x : 1 .. EXCHANGES) { exchange(takes_part) }
  }
}

proctype Watchdog() {
end:
  do
  :: d_step { openings > 0 -> openings--; quiet = 0; bell = OPENED }
#ifndef NO_WATCHDOG
  :: d_step { producer_ended && !aborted -> aborted = true; quiet = 0 }
  :: d_step { aborted && bell == 0 -> bell = OPENED }
#endif
  od
}

init { atomic { run Producer(); run Consumer(); run Watchdog() } }
