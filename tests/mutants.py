"""Do the tests notice a wrong line? One fault at a time is planted in a copy of the tree, and its tests run there.

    make mutants                       every fault, one to a core at a time: about half an hour on two cores
    make mutants ARGS="clip dropout"   those faults alone whose description holds one of the words

A fault is a text that stands exactly once in SOURCES and FOLDERS together, so it is found wherever its line has moved,
and however its line is broken. Its tests are files of tests/, run until one fails: those of `make test` first, then
those marked slow. In the end the tests that failed run on the tree as it is: one that fails there too has not noticed
anything.

Exits with 1 when a fault goes unnoticed, or when its text does not stand exactly once. tests/test_mutants.py looks at
the second at once.
"""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["train.py", "sample.py", "breakit.py", "bench.py"]
FOLDERS = ["conf", "training", "sampling", "parallel", "model", "kernels", "kernels/hopper", "data", "lab"]
SECONDS = 600  # that the tests of one fault may take
NO_TESTS = 5  # what pytest leaves with where it found none
SAID = "said.txt"  # what pytest prints
# Each pytest is a fork of one process that has imported what takes seconds.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "hydra", "matplotlib", "tiktoken", "pytest", "xdist"])

DEFINITION = "attention::test_it_is_the_definition_in_float64"
PENALTY = "cache::test_a_talk_is_penalized_as_one_prompt_with_its_text"
PAGES = "cache::test_neither_cache_nor_pages_change_a_token_that_is_drawn"
TOKEN = "cache::test_a_token_has_the_logits_of_the_whole_text_and_in_pages_the_same_bits"
SEVERAL = "cache::test_several_tokens_after_a_prompt_see_what_the_cache_holds"
LIKELIEST = "cache::test_the_likeliest_tokens_are_the_same_past_the_context"
SESSION = "cache::test_a_session_answers_as_the_whole_text_does"
NO_CACHE = "cache::test_what_has_no_cache_is_sampled_without"
BITS = "train::test_bits_per_byte_are_the_bits_of_the_loss_over_the_bytes_of_the_text_that_was_predicted"
NORMS = "norm::test_gradients_are_within_twice_autograds_error"
NORM = "train::test_the_norm_that_is_logged_is_the_gradients_and_not_the_scaled_ones"
OPTIONS = "train::test_attentions_options_reach_every_layer_in_training_and_validation"
RESUMED = "resume::test_a_run_stopped_at_5_and_resumed_is_the_run_of_10_steps_bit_for_bit"
IMPORTED = "exchange::test_logits_are_transformers_after_import_and_after_export"
WRITING = "test_a_sample_by_what_is_kept_from_the_last_one_is_that_of_todays_weights"
EVALUATED = "step::test_validation_losses_are_recorded_once_for_each_shape_and_each_is_its_own_batchs"
STRANGER = "exchange::test_a_strangers_folder_is_refused_in_one_line"
SKIPPED = "train::test_a_step_that_the_scaler_leaves_out_is_no_nan_and_changes_no_weight"


class Fault(NamedTuple):
    what: str
    old: str
    new: str
    tests: str  # files of tests/ without test_ and .py, or FILE::TEST of them, the likeliest to notice first


TABLE = [
    # --- the step ---
    ("gradients are never clipped", "optimizer.grad_clip or math.inf", "math.inf", "arithmetic"),
    ("the loss is not divided by the passes", "share / (len(batches.x) * ranks.size)", "share", "arithmetic"),
    ("z_loss is not handed on", "z_loss=self.cfg.z_loss", "z_loss=0.0", "arithmetic"),
    ("gradients add up over the steps", "self.model.zero_grad(set_to_none=True)", "pass", "arithmetic"),
    ("gradients stay scaled in fp16", "self.scaler.unscale_(optimizer)", "pass", NORM),
    ("fp16 steps over infinite gradients", "if self.scaler.is_enabled() else", "if False else", SKIPPED),
    ("every infinite gradient ends an fp16 run", "(norm.isfinite() | (scale > 1))", "norm.isfinite()", SKIPPED),
    ("an update after a bad one is made", "self.stopped |= ", "self.stopped = ", "step"),
    ("the average takes a bad update in", "self.average_weight * (1 - self.left_out)", "self.average_weight", "step"),
    ("Muon makes bad updates", "torch.where(self.found_inf == 1, old, now)", "now", "step"),
    ("the state is that of the batches drawn", "self.coming.popleft().result()",
     "self.coming.popleft().result()[0], self.loader.state_dict()", "step"),
    ("an evaluation's time is the next step's",
     "            run.train_step.restart_clock()\n        run.writer", "        run.writer", "step"),
    ("a checkpoint is named before it is complete", "run.writer.wait()\n    run.ranks.wait()", "run.ranks.wait()",
     "train::test_a_checkpoint_is_complete_when_the_run_names_it"),
    ("training goes on in a checkpoint's tensors", "= kept[name].copy_(x)", "= x", "checkpoint"),
    ("infinite logits are drawn from", "largest.isnan().any()[None]", "logits.isnan().any()[None]", "sample"),
    # --- the loop ---
    ("evaluated before all updates are done", "(due or signals or oldest_is_done(run))", "oldest_is_done(run)", "step"),
    ("the step at which the run stopped is the last one sent", "run.step, run.val_loss = done.step, math.inf",
     "run.val_loss = math.inf", "step"),
    ("a late record is of the last step sent", '"step": done.step,', '"step": self.step,', "step"),
    ("the rate of the step before", "learning_rate(run.place,", "learning_rate(run.place - 1,", "arithmetic"),
    ("the average has its full length at once",
     "min(cfg.ema_decay, (1 + run.step) / (10 + run.step))", "cfg.ema_decay", "arithmetic"),
    ("the average is the wrong way round", "batches, lr, 1 - decay)", "batches, lr, decay)", "arithmetic"),
    ("bits per byte by tokens", "self.tokens_per_step / (math.log(2) * max(1, size))", "1 / math.log(2)", BITS),
    ("an evaluation is that of the recorded batch", "            place.copy_(batch)\n", "", EVALUATED),
    ("evaluations stay in the memory of an old graph", "self.losses.clear()", "pass", EVALUATED),
    # --- several processes ---
    ("each rank has its own mean loss", "(len(batches.x) * ranks.size)", "len(batches.x)", "parallel"),
    ("gradients are not summed", "dist.all_reduce(x)", "dist.all_reduce(x.clone())", "parallel"),
    ("gradients are used before they have arrived", "message.wait()  #", "pass  #", "parallel"),
    ("another rank's pass draws no seeds", "self.model.seeds(self.device)  #", "pass  #", "parallel"),
    ("all ranks evaluate all batches", "if i % run.ranks.data_size == run.ranks.data_rank:", "if True:", "parallel"),
    ("bits per byte of one rank's text", "int(sizes.sum())", "int(sizes[0])", "parallel"),
    ("each part begins at the first position", "slice(self.rank * n, (self.rank + 1) * n)", "slice(n)", "parallel"),
    ("each part has the stream's first masks", "first=part.share * B", "first=0", "parallel"),
    ("each piece has the stream's first masks", "else context.rows[tokens]", "else context.rows[:n]",
     "gpt::test_pieces_give_the_gradients_of_the_whole_within_the_error_budget"),
    ("each part's heads have the first masks", "arange(self.rank * H, (self.rank + 1) * H,", "arange(H,", "parallel"),
    ("each part's sequences have the first masks", "self.share * B, (self.share + 1) * B,", "B,", "parallel"),
    ("heads come back in another order", "x.permute(1, 2, 0, 3, 4", "x.permute(1, 2, 3, 0, 4", "parallel"),
    ("heads that were exchanged come with those before", 'options["qkv"] = None  # it', 'pass  # it',
     "parallel::test_heads_that_were_exchanged_do_not_come_with_those_before"),
    ("a compiled model takes a part for the whole", "idx, documents, setting, stages)", "idx, documents, None, stages)",
     "parallel::test_a_model_in_parts_counts_the_tokens_of_a_part_as_the_whole_model_does"),
    ("an exchange is counted once", "exchanged = 2 * (2 * config", "exchanged = (2 * config", "parallel"),
    ("a validation loss adds up the processes of a sequence", "tokens / run.ranks.part.ranks for", "tokens for",
     "parallel"),
    # --- keys and values that go round ---
    ("a part of the keys counts for all of them", "merge([before, (m_i,", "merge([(m_i,", "ring"),
    ("a part's o is one key's value", "(m_i, torch.ones_like(m_i),", "(m_i, torch.full_like(m_i, 2.0),", "ring"),
    ("the gradients of other processes' queries are lost", "own + returning()", "own", "ring"),
    ("the first process sees the last one's keys", "early if source.rank < part.rank else both", "both", "ring"),
    ("positions are those in the whole sequence", " - source.cut(places)[0, columns.start]", "", "ring"),
    ("over a distance a late piece does not see itself", "[(late, late)] * (source.rank >= part.rank)", "[]", "ring"),
    ("one process has the end of the sequence", "pieces[-1 - self.rank]),", "pieces[self.rank + 1]),", "ring"),
    ("keys are masked by the documents of the queries", "source.cut(documents)[:,", "part.cut(documents)[:,", "ring"),
    ("keys go to the process before", "sent[(part.rank + 1) % part.ranks] = received[part.rank - 1] =",
     "sent[part.rank - 1] = received[(part.rank + 1) % part.ranks] =", "ring"),
    ("a checkpoint makes the keys go round again", '"tilegpt::tiled_forward", "tilegpt::ring_forward"',
     '"tilegpt::tiled_forward"', "ring"),
    ("gradients that go round are counted in 16 bits", "max(4, width)", "width // 2", "parallel"),
    # --- evaluation, sample and resume ---
    ("validation with dropout", "model.eval()\n", "\n", "arithmetic"),
    ("a short batch counts as a whole one",
     "sizes.append(batch.y.numel())", "sizes.append(run.cfg.batch_size * run.cfg.model.context_length)", "arithmetic"),
    ("a sample takes training's random numbers", "model, Sampler(), generator", "model, Sampler(), None", "arithmetic"),
    ("a later sample is of the first one's weights", "if run.session is not None:\n        torch._foreach_copy_(",
     "if run.session is not None:\n        zip(", "train::" + WRITING),
    ("the weights are kept, not their average",
     "named_parameters()), run.averaged", "named_parameters()), run.model", "arithmetic"),
    ("the data begins anew on resume", 'loader.load_state_dict(resumed.state["loader"])', "pass", RESUMED),
    ("random numbers begin anew on resume", "set_rng_state(tensors)\n    loader", "loader", RESUMED),
    ("the average is trained on after resume", 'p.copy_(as_in(tensors[f"{name}.trained"], p))', "pass", RESUMED),
    ("the scaler begins anew on resume", 'scaler.load_state_dict(resumed.state["scaler"])', "pass", RESUMED),
    # --- optimizer and rate ---
    ("betas swapped", "betas = (config.beta1, config.beta2)", "betas = (config.beta2, config.beta1)", "arithmetic"),
    ("norms and biases decay too", '2], "weight_decay": 0.0', '2], "weight_decay": config.weight_decay', "optimizer"),
    ("embeddings do not decay", "if p.dim() >= 2]", "if p.dim() >= 2 and len(p) < 100]", "optimizer arithmetic"),
    ("min_lr_ratio is ignored", "floor = config.min_lr_ratio * config.lr", "floor = 0.0", "optimizer arithmetic"),
    ("the warm-up begins at 0", "config.lr * step / config", "config.lr * (step - 1) / config", "optimizer"),
    ("cosine takes the warm-up for a part of itself", "max(1, steps - config.warmup_steps)", "steps", "arithmetic"),
    ("wsd ends a step late", "(steps - step) / decay_steps", "(steps - step + 1) / decay_steps", "optimizer"),
    ("Muon's steps have another size",
     "0.2 * math.sqrt(max(ps[0].shape))", "max(1, ps[0].shape[0] / ps[0].shape[1]) ** 0.5", "step"),
    ("Muon's momentum is always the default",
     "MOMENTUM if config.momentum is None else config.momentum", "MOMENTUM", "optimizer"),
    ("the rate grows with the width", "6e-4 * 768 / n_embd", "6e-4 * n_embd / 768", "arithmetic"),
    # --- checkpoints and metrics ---
    ("best is the highest loss", "min(losses,", "max(losses,", "checkpoint"),
    ("the oldest checkpoints are kept", "past[-keep_last:]", "past[:keep_last]", "checkpoint"),
    ("done names the worst evaluation", "loss < self.best[0]", "loss > self.best[0]", "metrics"),
    ("steps wait for a picture", "self.later(partial(self._draw, self.step))", "self._draw(self.step)", "metrics"),
    ("a picture that cannot be written is not told", "self.still_there()\n        self.raise_errors()\n",
     "self.still_there()\n", "metrics"),
    ("the resumed step's record is lost", 'record["step"] <= step]', 'record["step"] < step]', "metrics"),
    # --- the model ---
    ("no 1 / sqrt(2 L) in the first weights",
     "0.02 / math.sqrt(2 * self.config.n_layer) if adds else 0.02", "0.02", "arithmetic"),
    ("SwiGLU with gelu", '"swiglu": F.silu', '"swiglu": F.gelu', "arithmetic"),
    ("squared ReLU is ReLU", "F.relu(y).square()", "F.relu(y)", "arithmetic"),
    ("squared ReLU is ReLU for one token", "x = tl.maximum(x, 0.0) * x", "x = tl.maximum(x, 0.0)", "decode"),
    ("k is not normed", "self.attention.k_norm(k).to(v.dtype)", "k", "arithmetic"),
    ("q is not normed if it is turned",
     "if self.config.qk_norm:  #", "if self.config.qk_norm and context.rope is None:  #", "arithmetic"),
    ("matrices of one shape share a norm in Muon", "y.norm(dim=(1, 2), keepdim=True)", "y.norm()", "step"),
    ("a norm of q and k is exported without a word", ', "model.qk_norm": model.qk_norm or None', "", "exchange"),
    ("a story that was cut is kept", "if left or expected == size else [rest]", "if left else [rest]", "download"),
    ("a download of stories that broke off is whole", "min(size, int(", "min(0, int(", "download"),
    ("gate and up swapped", "ACTIVATIONS[act](gate(y)) * layer(y", "ACTIVATIONS[act](layer(y)) * gate(y", "arithmetic"),
    ("gelu is always the exact one", 'partial(F.gelu, approximate="tanh")', "F.gelu", f"arithmetic {IMPORTED}"),
    ("rmsnorm with torch's epsilon", "config.n_embd, eps=config.norm_eps)", "config.n_embd)", "arithmetic"),
    ("the mlp without its norm", "ACTIVATIONS[act](layer(y))\n", "ACTIVATIONS[act](layer(x))\n", IMPORTED),
    ("no norm before the head", "x = last_norm(self.norm, x, added)", "x = added.to(x)", f"arithmetic {IMPORTED}"),
    ("more than eight kinds of blocks run uncompiled", "max(config.recompile_limit, 2 + model.config.n_layer)",
     "config.recompile_limit", "gpt::test_blocks_that_are_alike_are_compiled_once_and_none_is_left_out"),
    ("the stream's gradient ends at a norm", "gradient = tl.load(dres", "gradient = 0 * tl.load(dres", NORMS),
    ("a program does its first rows alone", "tl.num_programs(0) * ROWS):", "N):", NORMS),
    ("a long table of sums is added up in part", "for first in range(0, P, 256):", "for first in range(0, 256, 256):",
     "norm::test_every_row_and_every_row_of_the_table_of_sums_counts_once"),
    ("a norm's mean has no gradient", "of_mean[:, None] + x_i", "0 * of_mean[:, None] + x_i", NORMS),
    ("what was dropped has a gradient", "tl.where(kept != 0, gradient.to(tl.float32) * scale, 0.0)",
     "gradient.to(tl.float32) * scale", NORMS),
    ("zeros stand for the last norm's stream", "by_function(norm, x, added, False)",
     "by_function(norm, x, added, True)[1]", "norm::test_the_gradient_along_the_stream_goes_from_kernel_to_kernel"),
    ("the head is tied when it should not be", "if config.tie_head:", "if True:", "arithmetic"),
    ("rope turns one half the wrong way", "b * cos + a * sin", "b * cos - a * sin", f"arithmetic {IMPORTED}"),
    ("a local layer has the other layers' rope base", "has_two and window is not None", "False", "gpt decode"),
    ("yarn leaves the scores as they were", "0.1 * math.log(yarn[0]) + 1", "1.0",
     "exchange::test_yarn_is_transformers_yarn"),
    ("yarn takes the new context for the old one",
     'parent["model"]["yarn_original"] = parent["model"]["context_length"]', "pass",
     "exchange::test_a_run_is_extended_to_a_longer_context"),
    ("a resumed length warm-up begins anew", "length_at(run.step + 1)", "length_at(run.train_step.steps + 1)", RESUMED),
    ("a recorded step is replayed for batches of another shape", "            self.graphs.clear()\n", "",
     "step::test_batches_of_another_shape_are_recorded_anew"),
    ("rope's base is always 10000", "frequency = base **", "frequency = 10000.0 **", "arithmetic"),
    ("every layer has the first one's window",
     "Block(config, attention_config.layer(i)", "Block(config, attention_config.layer(0)", OPTIONS),
    ("z_loss has the wrong sign", "1 + 2 * z_loss * lse", "1 - 2 * z_loss * lse",
     "loss::test_is_cross_entropy_in_value_and_gradient"),
    ("z_loss has the wrong sign in the kernel", "1 + 2 * z_loss * (m", "1 - 2 * z_loss * (m",
     "loss::test_rows_that_are_no_symbols_do_not_count_and_get_no_gradient"),
    ("the loss's running sum is not rescaled", "l * tl.exp2((m - m_new) * LOG2E)", "l",
     "loss::test_a_block_that_lies_lower_than_the_other_weighs_less"),
    ("two chunks of logits at a time", "del dlogits", "pass",
     "loss::test_the_logits_of_one_chunk_are_freed_before_the_next_ones_are_made"),
    ("ignored targets count in the mean", "return total / count", "return total / len(targets)",
     "loss::test_is_cross_entropy_in_value_and_gradient"),
    ("top_p keeps one too few", "p.cumsum(-1) - p >= self.top_p", "p.cumsum(-1) >= self.top_p", "sample"),
    ("top_k keeps one too few", "logits < smallest", "logits <= smallest", "sample"),
    ("min_p is a share of 1", "logits < math.log(self.min_p)", "logits.softmax(-1) < self.min_p", "sample"),
    ("the penalty makes negative logits likelier", "logits < 0, logits *", "logits < 0, logits /", "sample"),
    ("new tokens are not penalized", "used.scatter_(1, token[:, None], True)", "used.clone()", "sample cache"),
    ("all rows draw from the first one's generator", "generator=own)", "generator=generator[0])", "sample"),
    ("of two stop strings the shorter is cut off", "min(complete)[1]", "max(complete)[1]", "talk"),
    ("the beginning of a stop string is shown", "next(begun, len(kept))", "len(kept)", "talk"),
    ("no text begins with a stop string", "for i in range(len(kept)) if", "for i in range(1, len(kept)) if", "talk"),
    ("generation sees the beginning of a long text", "prompt[-context:] for", "prompt[:context] for", LIKELIEST),
    ("a session knows the end of a text that slides", "if len(ends) == 1 else []", "if ends else []", SESSION),
    # --- a model of transformers ---
    ("a model of transformers loses its window", "window=sliding_window or own.window", "window=own.window", "adapter"),
    ("a model of transformers loses its scale", "softmax_scale=scaling, seed=seed", "seed=seed", "adapter"),
    ("a model of transformers loses its dropout", "own.softcap, dropout_p=dropout)", "own.softcap)", "adapter"),
    ("a mask of transformers is not compared",
     "torch.equal(attention_mask, seen.expand_as(attention_mask))", "True", "adapter"),
    ("a cache of fixed size is taken for a text", "plain = T in (1, T_k)", "plain = True", "adapter"),
    # --- the cache ---
    ("a token is a position late", "slice(at[0], at[0] + 1)", "slice(at[0] - 1, at[0])", TOKEN),
    ("sequences of different lengths have one position", "torch.tensor(at, device=self.device)[:, None]",
     "slice(max(at), max(at) + 1)", TOKEN),
    ("what a shorter sequence has not filled is seen", "back, back > position)", "back)", TOKEN),
    ("alibi counts slots", "arange(T_k, device=self.device)) % size", "arange(T_k, device=self.device)).abs()", TOKEN),
    ("a window's buffer has a slot too few", "min(config.window or context_length, context_length)",
     "min(config.window - 1 or 1 if config.window else context_length, context_length)", TOKEN),
    ("a long prompt leaves its first keys", "x[:, :, T - T_last :]", "x[:, :, :T_last]", TOKEN),
    ("every sequence's prompt goes to the first rows", "1:])[self.rows]", "1:])[: len(x)]", TOKEN),
    ("what follows a prompt is kept in the first slots", "self.past + T - T_last, self.past +", "T - T_last,", SEVERAL),
    ("what follows a prompt does not see it",
     "before], x), dim=2) if self.past", "before], x), dim=2) if False", SEVERAL),
    ("a cut passes over what a window has lost", "max(self.lengths) <= layer.size", "True or layer.size", SEVERAL),
    ("a session takes any text for the one it knows", "if new != old)", "if False)", SESSION),
    ("a talk is penalized for what was taken back", "self.used.copy_(used)", "self.used.logical_or_(used)", PENALTY),
    ("a talk is penalized for what the model sees", "self.count(idx)", "self.count(idx[:, -self.context :])", PENALTY),
    ("samples write into the page that they share", "self.owners[held[i]] == 1:", "self.owners[held[i]]:", PAGES),
    ("a page's copy is empty", "buffer[copies[1]] = buffer[copies[0]]", "pass", PAGES),
    ("pages are lost when their memory grows", "grown[: len(buffer)] = buffer", "pass", PAGES),
    ("pages do not come back", "self.free.append(page)", "pass", "cache::test_memory_follows_the_lengths"),
    ("a prompt is not shared", "rows, shared=same)", "rows)", "cache::test_samples_of_one_prompt_share_its_full_pages"),
    ("a tile reads the page before its own", "tl.minimum(first + step, T_k - 1)", "first",
     "decode::test_one_row_is_within_twice_naives_error_however_the_keys_are_split"),
    ("a recorded token reads pages that have moved", "self.moved != self.cache.moved:", "False:",
     "decode::test_a_token_is_recorded_again_when_the_memory_of_its_pages_moves"),
    ("all sequences have the first one's pages", "table += b * table_b", "table += 0",
     "decode::test_one_row_is_within_twice_naives_error_however_the_keys_are_split"),
    ("splits are not rescaled", "(alpha * acc_i).sum(0)", "acc_i.sum(0)", TOKEN),
    ("the sum of splits is not rescaled", "(alpha * l_i).sum(0)", "l_i.sum(0)", TOKEN),
    ("a hidden split is NaN", "m.clamp_(min=LOWEST)", "pass", TOKEN),
    ("autocast rounds the sums of a token", "add_product(torch.empty_like(q, dtype=wide), p.to(v.dtype), v, beta=0.0)",
     "p.to(v.dtype) @ v", "cache::test_autocast_changes_no_bit"),
    ("broken attention is repaired by the cache",
     'return why_not("cache", wanted(model.attention_config, model.break_it)) or None', "return None", NO_CACHE),
    ("a block mask is lost in the cache", '{"block_mask": "the cache has no block masks"}', "{}", NO_CACHE),
    ("half keeps everything", "(context - context // 2)", "1", LIKELIEST),
    ("stop is a token early", "max(lengths)) + 1)", "max(lengths)))", PAGES),
    ("every token runs the whole text", "found is None or sees !=", "True or sees !=", "cache"),
    # --- a token on a CPU ---
    ("a token has the first one's position", "slice(at[0], at[0] + 1) if", "slice(0, 1) if", TOKEN),
    ("a token's logits have padding", "return y[..., : self.config.vocab_size]", "return y", TOKEN),
    # --- a token's kernels ---
    ("the new token is not kept", "if slot // BLOCK_N % splits == split:", "if slot < 0:", "decode"),
    ("a tile has the new token's slot", "seen = (j < T_k) & (j != slot)", "seen = j < T_k", "decode"),
    ("two splits have a tile", "start, step = split * BLOCK_N,", "start, step = split // 2 * BLOCK_N,", "decode"),
    ("the new token is taken in without rescaling", "return m_new, l * alpha + p,", "return m_new, l + p,", "decode"),
    ("the new token has no softcap", "s = softcap * tanh(s * scale / softcap) * LOG2E", "s = s * scale2", "decode"),
    ("the last key is not seen", "seen = (j < T_k) &", "seen = (j < T_k - 1) &", "decode"),
    ("a window's buffer grows on", "T_k = tl.minimum(at + 1, S)", "T_k = tl.minimum(at + 1, S + 1)", "decode"),
    ("alibi counts slots in the kernel", "((slot - j + S) % S)", "tl.abs(slot - j)", "decode"),
    ("the program that merges is not the last", "== parts - 1:", "== parts - 2:", "decode"),
    ("tickets are not given back", "tl.store(tickets + n, 0)", "pass", "decode"),
    ("a tile's sums are not rescaled", "l = l * alpha + tl.sum(p, -1)", "l = l + tl.sum(p, -1)", "decode"),
    ("warps' sums are not rescaled", "tl.sum(l * alpha, 0)", "tl.sum(l, 0)", "decode"),
    ("merged sums are not rescaled", "tl.sum(alpha_i * l_i, 0)", "tl.sum(l_i, 0)", "decode"),
    ("all heads of a group write one state", "* splits + split) * G + g", "* splits + split) * G + 0 * g", "decode"),
    ("rotary halves have one sign", "tl.where(d < half, -s, s)", "s", "decode"),
    ("scores are not scaled to the softcap again", "s = softcap * tanh(s / softcap", "s = tanh(s / softcap", "decode"),
    ("padding counts in the norm", "tl.where(known, columns(x, row, first, B, K, STEP) - mean[:, None], 0.0)",
     "columns(x, row, first, B, K, STEP) - mean[:, None]", "decode"),
    ("a norm counts the last columns alone", "squares += tl.sum", "squares = tl.sum", "decode"),
    ("a mean counts the last columns alone", "mean += tl.sum", "mean = tl.sum", "decode"),
    ("the norm has no epsilon", "squares / K + eps", "squares / K", "decode"),
    ("a step's weights are those of the last", "where(last, 0, first + BLOCK_K)", "where(last, 0, first)", "decode"),
    ("a norm has one step's weights in all",
     "scale, shift = of_norm(norm_weight, norm_bias, k, K, BLOCK_K, NEAR, LATE)", "pass", "decode"),
    ("a program's outputs have the first ones' weights", "tl.where(last, n + step, n)", "n", "decode"),
    ("a program's outputs have the first ones' bias",
     "n += step\n            b, b_gate = of_columns(bias, n, N), of_columns(gate_bias, n, N)", "n += step", "decode"),
    ("the gate is not activated", "activated(acc_gate + b_gate[None, :], ACTIVATION)",
     "(acc_gate + b_gate[None, :])", "decode"),
    ("parts are compared by their own largest logits",
     "z += tl.where(most_i == most, 0.0, (most_i - most) / temperature)", "z += 0.0", "decode"),
    ("an infinite logit is a choice", '(most == float("inf")) | ', "", "decode"),
    ("a NaN among the logits is not told", 'tl.where(spoilt, float("nan"), most)', "most", "decode"),
    ("a token is embedded without its position", "row += tl.load(positions", "row += 0 * tl.load(positions", "decode"),
    ("sequences share a position", "tl.load(at + b) * C", "tl.load(at) * C", "decode"),
    ("a prompt's length is not its token's position", "rows] = past + T - 1", "rows] = past + T", SEVERAL),
    ("what follows a prompt does not move the position", "self.at[rows] = past + T -", "self.at[rows] = T -", SEVERAL),
    ("a cut does not move the position", "self.at.clamp_(max=T - 1)", "pass", SEVERAL),
    # --- attention ---
    ("dp is rounded to 16 bits", "dp = product(do_i, v_j, 1.0, on_chip[1])",
     "dp = product(do_i, v_j, 1.0, on_chip[1]).bfloat16().float()",
     "attention::test_tiled_is_as_exact_as_torchs_flash_where_one_key_has_nearly_all_the_weight"),
    ("query heads share keys by turns", "k.repeat_interleave(groups, dim=1)", "k.repeat(1, groups, 1, 1)", DEFINITION),
    ("softcap's derivative is 1 - tanh", "torch.mul(s, s, out=cap_gradient)", "cap_gradient.copy_(s)", DEFINITION),
    ("lse's gradient has the wrong sign", "delta -= dlse", "delta += dlse", DEFINITION),
    ("half of the heads have another slope", "2 ** (-8 * i / n)", "2 ** (-4 * i / n)", DEFINITION),
    ("a window sees one key more", "seen &= j >= i + mask.at_least", "seen &= j > i + mask.at_least - 2", DEFINITION),
    ("a tile at a window's edge counts as whole", "whole &= left >= last", "whole &= left >= last - 1",
     "mask::test_a_tile_is_never_skipped_with_something_seen_nor_called_whole_with_something_hidden"),
    ("dropout's survivors are not scaled", "256 / (256 - drop_threshold(dropout_p))", "1.0", DEFINITION),
    ("the threshold is cut off, not rounded", "threshold = round(", "threshold = int(", "dropout"),
    ("the dropout bits have a round less", "ROUNDS = 7", "ROUNDS = 6", "dropout"),
    # --- weights in and out ---
    ("a run begins with new weights", "model.load_state_dict(parent.model)", "pass",
     "exchange::test_a_run_begins_at_the_loss_that_transformers_has"),
    ("a shorter context has the last positions", "[: cfg.model.context_length]", "[-cfg.model.context_length :]",
     "exchange::test_a_child_of_a_run_has_its_weights_options_and_tokenizer"),
    ("an imported norm has the default epsilon", '("layer_norm_epsilon", "norm_eps", 1e-5),', "", IMPORTED),
    ("the exact gelu is taken for GPT-2's", '"gelu": "gelu"}', '"gelu": "gelu_tanh"}', IMPORTED),
    ("Mistral's window is left out", 'window = number(theirs, "sliding_window", 4096)', "pass", IMPORTED),
    ("missing biases are exported as ones", "torch.zeros(sum(sizes))", "torch.ones(sum(sizes))",
     "exchange::test_a_run_with_padding_and_without_biases_is_exported"),
    ("links lead out of a stranger's folder", "not file.resolve().is_relative_to(root.resolve())", "False", STRANGER),
    ("a file of any size is parsed", "st_size) > limit", "st_size) > limit << 20", STRANGER),
    ("shapes are not compared", "if tuple(there.get_shape()) != shape", "if False", STRANGER),
    ("weights may be NaN", "if not weight.isfinite().all()", "if False", STRANGER),
    ("scaled rotary positions are taken for plain ones", '{**rope, "rope_theta": 0} not in PLAIN_ROPE', "False",
     "exchange::test_a_changed_configuration_gives_transformers_logits_or_is_refused"),
    ("merges may come in any order", "if ids != sorted(ids)", "if False",
     "exchange::test_another_kind_of_tokenizer_is_refused_in_one_line"),
    ("HellaSwag's answer has the lowest sum of losses", "sum(1) / (batch.y != IGNORE).sum(1)", "sum(1)", "hellaswag"),
    ("a typed key whose partner is off is ignored", "if not partners or any(", "if True or any(",
     "keys::test_a_key_that_was_typed_is_read_or_refused"),
    ("eval_only ignores keys of the training", "if name != mode and not {", "if name == mode and not {",
     "keys::test_a_measurement_refuses_what_is_for_training"),
    ("HellaSwag's endings are scored without their first token", ": -len(end)]", ": 1 - len(end)]", "hellaswag"),
    ("HellaSwag's endings follow the text without a space", '" " + ending', "ending", "hellaswag"),
    ("a text of HellaSwag that is too long loses its end", "end)[-context - 1 :]", "end)[: context + 1]", "hellaswag"),
    # --- data ---
    ("the target is the token itself", "slice(1, None))\n", "slice(None, -1))\n", "data"),
    ("a document begins a token late", 'start + n), side="right")', "start + n))", "data"),
    ("short sequences are those of whole windows", "generator.permutation(self.windows * pieces)",
     "(generator.permutation(self.windows)[:, None] * pieces + np.arange(pieces)).ravel()", "data"),
    ("a length warm-up begins anew on resume", "        self.coming: deque[",
     "        self.step = 0\n        self.coming: deque[", RESUMED),
    ("a filler of a packed window is of the document that it repeats",
     "parts[-1][-1] + 1 - part[0] if parts else 0", "0", "data"),
    ("packing cuts documents that fit", "number * T, np.minimum", "number, np.minimum", "packing"),
    ("documents are packed from the shortest on", "np.argsort(-lengths", "np.argsort(lengths", "packing"),
    ("a packed run is resumed without packing", 'str("packed" in state).lower()', "str(self.packed).lower()", "data"),
    ("eval_only measures the context of the training", "device, cfg.model.context_length).eval()",
     "device).eval()", "context::test_eval_only_measures_a_run_with_another_context"),
    ("every epoch is in the first one's order", "[self.seed, epoch]", "[self.seed, 0]", "data"),
    ("ranks take overlapping samples", "self.rank * self.batch_size", "self.rank", "data"),
    ("the loader's state is a batch late", 'return state | {"packed": 1} if',
     'state["position"] += self.batch_size\n        return state | {"packed": 1} if', f"data {RESUMED}"),
    ("validation is the beginning of its text", "arange(taken) * windows // taken", "arange(taken)", "data arithmetic"),
    ("a token stands for one byte", "lengths[rank] = len(token)", "lengths[rank] = 1", f"tokenizer {BITS}"),
    ("documents have no end-of-text token between", "writer.write(end_of_text)", "pass", "data"),
    ("a text that repeats is in both splits", "[self.split_of[self.order] != REPEATED]", "", "data"),
    # --- pictures of attention, the list of runs ---
    ("weights are not rescaled", 'p.mul_(watch["alpha"])', "pass", "look"),
    ("weights are not divided by their sum", "(p / (l.clamp(min=TINY) if guarded else l))", "p", "look"),
    ("a point of a picture adds up its rows", "maps /= (torch.arange(T) // block).bincount()[:, None]", "pass", "look"),
    ("a head that copies reads the copy itself", "(tokens.roll(1) == now)", "(tokens == now)", "look"),
    ("a frame mixes heads", ".swapaxes(1, 2).reshape(L * N", ".reshape(L * N", "look"),
    ("a broken run's page has its own weights twice", 'found.state["config"]["break_it"] = {}', "pass", "look"),
    ("a run is listed by its first checkpoint", "reversed(checkpoint.all_checkpoints(run / checkpoint.FOLDER))",
     "checkpoint.all_checkpoints(run / checkpoint.FOLDER)", "listing"),
    ("the film is that of dropout", "evaluation_mode(run.averaged) as model, run.train_step.autocast:\n        found",
     "nullcontext(run.averaged) as model, run.train_step.autocast:\n        found", "look"),
    # --- more of training ---
    ("the moving average has no warm-up", "(1 + run.step) / (10 + run.step)", "(10 + run.step) / (1 + run.step)",
     "arithmetic::test_a_run_is_its_formulas"),
    ("a run that failed is closed as one that succeeded", "run.metrics.close(run.code)", "run.metrics.close()",
     "train::test_a_run_that_failed_closes_its_metrics_whatever_became_of_its_last_checkpoint"),
    ("a resumed run under another name enters a run that exists", "stack, resumed if same_run else None)",
     "stack, resumed)", "resume::test_a_checkpoint_under_a_name_of_ones_own_is_resumed_as_a_new_run"),
    ("a run with init_from= measures nothing before step 1", "if resumed else True,", "if resumed else False,",
     "resume::test_a_signal_ends_what_is_done_between_steps_and_the_resumed_run_does_it"),
    ("a signal during the last evaluation is forgotten", "signals and (run.unfinished or not run.ended):",
     "signals and not run.ended:", "resume::test_a_signal_ends_what_is_done_between_steps_and_the_resumed_run_does_it"),
    ("the last step is not logged if log_every misses it", "0 or last or numbers.stopped:", "0 or numbers.stopped:",
     "minutes::test_a_run_whose_minutes_are_over_ends_as_one_that_has_made_its_steps"),
    ("a sweep does not check tokens_per_step beforehand", "device, dtype, attention, way, passes(cfg)",
     "device, dtype, attention, way, 1", "sweep::test_a_job_that_cannot_run_is_named_before_the_first_one_starts"),
    ("a checkpoint made by a signal competes for the best", "run.val_loss) and ACTIVITIES[-1].due(run) else None",
     "run.val_loss) else None", "resume::test_a_signal_ends_what_is_done_between_steps_and_the_resumed_run_does_it"),
    ("a later fault may delete the first one", '"faults/later" if checkpoint.last(run.folder / "faults") else "faults"',
     '"faults"', "probe::test_the_first_fault_of_a_run_outlives_those_of_its_resumptions"),
    ("checkpoints of later steps stay after a resume", "past = [path for path in found if step_of(path) <= step]",
     "past = list(found)", "checkpoint::test_steps_of_a_future_that_was_left_go"),
    ("of equally good checkpoints the latest is the best", "past if math.isfinite(loss := _loss(path)",
     "reversed(past) if math.isfinite(loss := _loss(path)", "checkpoint::test_a_damaged_checkpoint_is_kept checkpoint"),
    ("resume=auto takes the run whose folder changed last", "have[run.name] = newest.lstat().st_mtime",
     "have[run.name] = run.stat().st_mtime", "checkpoint::test_resume_finds"),
    ("an infinite gradient does not stop a run in float32", "norm.isfinite() | (scale >", "norm.isfinite() | (scale >=",
     "step::test_a_bad_update_and_those_after_it_change_no_weight_no_momentum_and_no_average"),
    ("the loss that is logged is that of the last pass", "loss += share.detach()", "loss = share.detach()",
     "arithmetic::test_a_run_is_its_formulas"),
    ("the remaining time ignores max_minutes", "min(self.left, (self.pace or seconds) * (self.cfg.steps - done.step)))",
     "(self.pace or seconds) * (self.cfg.steps - done.step))",
     "minutes::test_the_time_left_is_that_of_the_steps_or_of_the_minutes_whichever_is_less"),
    ("a run from standard input forgets where its text is", "cfg.data.path = str(dataset.folder)",
     "cfg.data.path = str(dataset.folder.name)", "sources::test_a_run_from_standard_input_goes_on_without_it"),
    ("ranks that share a sequence load different ones", "rank=ranks.data_rank,", "rank=ranks.rank,", "parallel"),
    ("a resumed run may change attention.documents", '"autotune", "kernel", "dropout_p")',
     '"autotune", "kernel", "dropout_p", "documents")', "bad_input::test_a_run_that_cannot_be"),
    ("a resumed run may change model.context_length", 'if cfg.eval_only and cfg.model.position != "learned":',
     'if cfg.model.position != "learned":', "resume::test_a_run_goes_on_with_its_context_and_is_measured_with_any"),
    ("eval_only measures the last checkpoint, not the best", 'which = "best" if cfg.eval_only else "last"',
     'which = "last"', "context::test_eval_only_measures_the_best_checkpoint_and_only_adds"),
    ("the context's standard error is a standard deviation", "float(gain.std() / math.sqrt(windows))",
     "float(gain.std())", "context::test_the_loss_by_position_is_that_of_a_plain_computation"),
    ("the headroom forgets where 16-bit weights end", "math.log(torch.finfo(call.q.dtype).max) - max_score",
     "math.log(torch.finfo(wide).max) - max_score", "probe::test_the_headroom_of_fp16_ends_at_11"),
    ("a lost connection stops a run under nohup", '"SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN',
     '"SIGHUP")', "machine::test_a_second_signal_is_named_and_under_nohup_a_lost_connection_stops_nothing"),
    ("a run goes on in another run's checkpoints", "and linked:", "and False:",
     "resume::test_a_run_whose_checkpoints_are_a_link_into_another_run_is_not_gone_on_with_there"),
    ("a curve's record without lengths is drawn", "if known and named and not huge", "if known and not huge",
     "metrics::test_every_row_is_valid_json_and_nan_comes_back_but_no_number_that_cannot_be_drawn"),
    ("a tokenizer's decoder is not looked at", '.get("type") != "ByteLevel":', '.get("type") == "x":',
     "exchange::test_another_kind_of_tokenizer_is_refused_in_one_line"),
    ("a tensor of another family's name is read", "or full not in (name, part.name)", "",
     "exchange::test_a_strangers_folder_is_refused_in_one_line"),
    ("a whole number is of any size", "value >= 1 << 63", "value >= 1 << 9999",
     "keys::test_a_value_outside_a_limit_is_one_line_with_the_way_out"),
    ("a script does not watch whether its threads may spin", "target=waiting.watch,", "target=print,",
     "machine::test_a_script_sets_how_threads_wait_and_where_kernels_are_kept_before_torch_but_not_over_the_user"),
    ("the time with a core counts as that without", '"schedstat").read_text().split()[1]',
     '"schedstat").read_text().split()[0]',
     "machine::test_the_time_without_a_core_is_that_in_which_others_have_it"),
    ("threads spin beside other programs", "threads) // (threads - 1) + 1", "threads) // (threads - 1)",
     "machine::test_threads_spin_alone_and_sleep_while_they_wait_for_cores"),
    ("threads sleep once and for ever", "        elif share < FREE:\n            spinning.set()\n", "",
     "machine::test_threads_spin_alone_and_sleep_while_they_wait_for_cores"),
    ("a checkpoint's copies are overwritten as it is written", "self.wait()\n        groups = (model, optimizer)",
     "groups = (model, optimizer)", "checkpoint::test_a_checkpoint_that_could_not_be_written_is_told_once"),
    ("a sweep succeeds if its last job does", "code = 1 if ended else code", "code = 1 if ended else 0",
     "sweep::test_a_sweep_fails_whichever_of_its_jobs_does"),
    # --- a time limit ---
    ("a time limit does not lower the rate", "left = run.left / run.pace if run.pace else math.inf", "left = math.inf",
     "minutes::test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace"),
    ("the rate rises when the time is over", "/ max(1.0, min(left, to_come))", "/ min(left, to_come)",
     "minutes::test_the_place_reaches_the_end_with_the_last_update_and_never_moves_back"),
    ("a compilation is taken for the pace", "statistics.median_low(self.times)", "statistics.fmean(self.times)",
     "minutes::test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace"),
    ("the time of an evaluation is known a step late", "run.spent = run.ranks.agree([], run.seconds()).spent", "pass",
     "minutes::test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace"),
    ("evaluations do not count", "run.spent = run.ranks.agree([], run.seconds()).spent",
     "run.began = time.perf_counter() - run.spent",
     "minutes::test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace"),
    ("an evaluation past the limit is the end", "    while not run.ended:", "    while not run.ending:",
     "minutes::test_the_rate_falls_to_its_minimum_by_the_limit_at_any_pace"),
    ("a warm-up takes all the time", "WARMUP_FRACTION = 0.2", "WARMUP_FRACTION = 2.0",
     "minutes::test_a_warm_up_takes_a_fifth_of_the_updates_that_there_is_time_for"),
    ("a resumed run has its minutes again", 'spent=state.get("seconds", 0.0)', "spent=0.0",
     "minutes::test_a_resumed_run_has_what_is_left_of_the_time_and_goes_on_with_its_rate"),
    ("a resumed run begins its schedule at its step", 'place=state.get("place", step)', "place=step",
     "minutes::test_a_resumed_run_has_what_is_left_of_the_time_and_goes_on_with_its_rate"),
    ("a run goes on without time", "minutes >= cfg.max_minutes and state", "False and state",
     "minutes::test_a_run_that_has_used_its_minutes_is_resumed_with_more_only"),
    ("the pace is the host's", "run.times.append(seconds)", "run.times.append(run.seconds() - run.spent)",
     "minutes::test_the_pace_is_the_devices_where_the_host_waits_for_it_now_and_then"),
    ("each rank has its own pace", "size, run.pace = run.ranks.agree(", "size, _ = run.ranks.agree(",
     "minutes::test_ranks_have_the_same_time_and_pace_whatever_their_clocks_say"),
    # --- more of the model and of attention ---
    ("the MLP's last matrix begins as large as the others", 'name.endswith((".out", ".down"))', 'name.endswith(".out")',
     "arithmetic::test_the_first_weights_are_normal_of_002_and_less_where_a_matrix_adds_to_the_stream"),
    ("a rank's MLP drops by another rank's mask", "numbers + (setting.batch or B)", "numbers + B", "parallel"),
    ("layers swap rope_base and rope_base_local", "[has_two and window is not None for window in windows]",
     "[has_two and window is None for window in windows]", "gpt::test_windowed_layers_have_a_rope_base_of_their_own"),
    ("mfu counts layers with windows as full ones", "min(self.attention_config.layer(i).window or T, T)",
     "min(self.attention_config.window or T, T)", "gpt::test_flops_of_a_window_count_the_keys_in_it"),
    ("YaRN keeps and slows the wrong frequencies", "math.log(original / (turns * 2 * math.pi))",
     "math.log(original / (turns * math.pi))", "exchange::test_yarn_is_transformers_yarn"),
    ("packed sequences are aligned at their first keys", "row - cu_q[of_rows + 1] + cu_k[of_rows + 1]",
     "row - cu_q[of_rows] + cu_k[of_rows]", "attention::test_a_pack_is_its_sequences_one_by_one"),
    ("a tile at the window's far edge counts as whole", "left >= last + self.at_least", "left >= first + self.at_least",
     "mask::test_a_tile_is_never_skipped_with_something_seen_nor_called_whole_with_something_hidden"),
    ("the last row that sees a tile of keys is left out", "columns[-1] - self.at_least + 1 - offset",
     "columns[-1] - self.at_least - offset", "mask attention::test_it_is_the_definition_in_float64"),
    ("tiled's dropout ignores the numbers of the heads", "tile.rows) if dropout.numbers is None else dropout.numbers",
     "tile.rows)", "parallel::test_attention_of_a_part_is_that_part_of_attention"),
    ("a call keeps the scale of the first call of its kind", "causal, softmax_scale, break_it.broken",
     "causal, break_it.broken", "mask::test_the_scale_comes_from_the_call_then_the_configuration_then_the_head_size"),
    ("a cache is used where break_it gains the scores", 'dict.fromkeys((*FAILURES, "score_gain"), "a cache would',
     'dict.fromkeys(FAILURES, "a cache would', "cache::test_what_has_no_cache_is_sampled_without"),
    ("every piece turns by the sines of the first one", "context.rope[1][..., tokens, :]",
     "context.rope[1][..., :n, :]", "gpt::test_pieces_give_the_gradients_of_the_whole_within_the_error_budget"),
    ("sdpa drops other weights when a block is computed again", 'config.impl == "sdpa" and config.dropout_p > 0',
     "False", "gpt::test_activation_checkpointing_changes_no_bit"),
    ("a Mistral without sliding_window gets no window", 'theirs.get("sliding_window", 4096)',
     'theirs.get("sliding_window")', "exchange::test_a_mistral_that_says_nothing_of_a_window_has_transformers_default"),
    # --- more of the kernels ---
    ("past 512 tiles a document's first tile is forgotten", "tl.minimum(start, tl.min(tl.where(some, t, n), 0))",
     "tl.min(tl.where(some, t, n), 0)", "flash::test_a_document_is_found_among_more_tiles_than_are_looked_at_at_once"),
    ("the series of softcap's tanh has a wrong sign", "-17 / 315", "17 / 315",
     "attention::test_it_is_within_twice_naives_error_at_any_tile_size"),
    ("a block mask is dropped though tiles straddle its blocks", "N == (mask.T_k - mask.T) % M == 0", "N == 0",
     "flash::test_a_picture_of_tiles_that_are_whole_or_cut_by_the_first_query_is_right_in_bfloat16"),
    ("the loss kernel's z-loss lacks the maximum", "(1 + 2 * z_loss * (m + tl.log(l)))", "(1 + 2 * z_loss * tl.log(l))",
     "loss::test_rows_that_are_no_symbols_do_not_count_and_get_no_gradient"),
    ("rmsnorm's gradient divides by the padded width", "(tl.sum(dy_i * x_i, 1) / C)[:, None]",
     "(tl.sum(dy_i * x_i, 1) / WIDTH)[:, None]", "norm::test_gradients_are_within_twice_autograds_error"),
    ("the tiles of a block mask that has changed stay", "lists(blocks, blocks._version, *of_mask)",
     "lists(blocks, 0, *of_mask)", "flash::test_a_picture_painted_over_is_read_again"),
    ("a window wider than the number of queries is ignored", "window <= T + T_k", "window <= T",
     "attention::test_a_pack_is_its_sequences_one_by_one attention::test_it_is_the_definition_in_float64"),
    ("the Hopper kernels take softcap and ignore it", 'score._fields[2:], score[2:]', 'score._fields[3:], score[3:]',
     "hopper::test_the_start_of_a_run_names_the_kernels_that_run"),
    ("the Hopper forward masks one tile where two are cut",
     "and not documents and (mask.at_most is None or (T_k - T) % ROWS == 0)", "and not documents",
     "attention::test_it_is_within_twice_naives_error_at_any_tile_size hopper"),
    ("dq of a second launch goes to the wrong heads", "*strides[2], begin * G, H, T, unseeing",
     "*strides[2], begin, H, T, unseeing", "hopper::test_heads_whose_sums_do_not_fit_at_once_take_turns"),
    # --- more of sampling ---
    ("parts of a vocabulary are compared without temperature", "most_i == most, 0.0, (most_i - most) / temperature)",
     "most_i == most, 0.0, most_i - most)", "decode::test_the_kernel_chooses_as_plain_pytorch"),
    ("half of an odd context is rounded the other way", "(context - length) % (context - context // 2)",
     "(context - length) % (context // 2)", "cache::test_half_of_an_odd_context_is_rounded_up"),
    ("a talk that fills its context exactly gets no answer", '"stop" and len(text) > self.context:',
     '"stop" and len(text) >= self.context:', "cache::test_a_text_that_fills_the_context_is_answered_by_one_token"),
    ("a page is freed that another sequence still has", "if not self.owners[page]:", "if self.owners[page] <= 1:",
     "cache::test_neither_cache_nor_pages_change_a_token_that_is_drawn cache"),
    ("a shorter sequence of a batch forgets its first token", "T_k, back, back > position)",
     "T_k, back, back >= position)", "cache::test_a_token_has_the_logits_of_the_whole_text_and_in_pages_the_same_bits"),
    ("ALiBi's distances turn negative in a window's buffer", "((slot - j + S) % S).to(tl.float32), -2)",
     "(slot - j).to(tl.float32), -2)", "decode::test_each_sequence_has_its_own_position_and_its_own_place_in_a_window"),
    ("a fused layer norm's mean is over the padded width", "mean /= K", "mean /= STEP",
     "decode::test_a_linear_layer_is_within_twice_the_modules_error"),
    ("in a chat the model sees what stop= has cut off", "if stream.stopped:", "if interrupted:",
     "talk::test_a_line_is_continued_after_all_that_is_on_the_screen"),
    ("tokens of samples that have ended count as made", "made + len(screen.going)", "made + count",
     "talk::test_a_row_that_has_ended_is_not_printed_or_counted"),
    ("a prompt file's byte order mark is a part of the prompt", 'return read().decode("utf-8-sig")',
     'return read().decode("utf-8")', "sample::test_a_prompt_arrives_as_it_was_typed_piped_or_put_in_a_file"),
    # --- more of several processes ---
    ("heads of several ranks share a dropout mask", "b[:, None] * (H * self.ranks) + h", "b[:, None] * H + h",
     "parallel::test_attention_of_a_part_is_that_part_of_attention"),
    ("ranks wait for the one with the most time left", "float(times.max())", "float(times.min())",
     "parallel::test_ranks_agree_on_any_signal_the_most_time_and_the_sum_of_their_texts"),
    ("in a ring lse counts its maximum in powers of two", "(m / LOG2E + l.log())", "(m + l.log())",
     "ring::test_attention_over_keys_that_go_round_is_attention"),
    ("a sharded average is evaluated with old weights", "reshard_after_forward=True", "reshard_after_forward=False",
     "parallel::test_a_step_of_shared_weights_sends_them_twice_and_the_gradients_once parallel"),
    ("each process of shared weights clips by its own norm", "dist.all_reduce(squares)", "pass",
     "parallel::test_two_processes_with_a_pass_each_are_one_process_bit_for_bit parallel"),
    ("sdpa's dropout is not refused with several processes", 'options["sdpa dropout"]', 'options["sdpa_dropout"]',
     "parallel::test_what_processes_cannot_share_is_refused_in_one_line"),
    # --- more of the data ---
    ("the cut end of a long document begins no document", 'Piece("val", start + at == cut, text[at:])',
     'Piece("val", start == 0, text[at:])', "data::test_every_document_arrives_once_and_validation_has_its_share"),
    ("neighbours in a packed window are one document", "parts[-1][-1] + 1 - part[0", "parts[-1][-1] - part[0", "data"),
    ("overlapping windows leave out the end of the text", "(len(tokens) - 1 - context_length) // (taken - 1)",
     "(len(tokens) - 1 - context_length) // taken", "data::test_validation_windows_may_overlap_if_the_text_is_short"),
    ("validation documents of shards have training's numbers", "np.union1d([0], starts[starts >= cut] - cut)",
     "np.union1d([0], starts[starts >= cut])", "sources::test_shards_are_split_where_they_lie"),
    ("a token one past the vocabulary is let through", "if largest >= encoding.n_vocab:",
     "if largest > encoding.n_vocab:", "bad_input::test_a_file_that_is_no_shard"),
    ("another data.val_fraction opens the old split", "json.dumps([FORMAT, label, data.val_fraction])",
     "json.dumps([FORMAT, label])", "data::test_a_corpus_is_known_by_its_content_and_not_by_its_files"),
    ("a text begins with its byte order mark", "stream.seek(0 if recode else len(mark))", "stream.seek(0)",
     "bad_input::test_a_file_that_is_no_text"),
    ("ids above 65,535 are written in 16 bits", "if n_vocab <= 1 << 16", "if n_vocab <= 1 << 17",
     "data::test_token_files_are_in_the_format_of_llm_c_and_large_vocabularies_in_that_of_llama_3"),
    ("documents of a large shard begin at wrong tokens", "ends.append(start + np.flatnonzero(",
     "ends.append(np.flatnonzero(", "sources::test_documents_begin_at_the_same_tokens_however_large_a_block_is_read"),
    ("a stop string at the beginning of a text is missed", "(at := kept.find(string)) >= 0",
     "(at := kept.find(string)) > 0", "talk::test_a_text_ends_before_the_first_stop_string_however_its_tokens_lie"),
    # --- the lab, breakit.py and bench.py ---
    ("nanoGPT's model learns at one rate", "step(loader.next(), learning_rate(place, cfg.steps, rates))",
     "step(loader.next(), rates.lr)", "learn::test_nanogpts_own_model_learns_by_its_recipe"),
    ("nanoGPT's bits are those of a token", "float(dataset.token_bytes[batch.y.numpy()].sum())", "batch.y.numel()",
     "learn::test_the_bits_per_byte_of_a_model_that_knows_nothing_are_those_of_its_vocabulary"),
    ("all trainings of mode=learn have one seed", 'f"seed={seed}"', '"seed=1"',
     "learn::test_each_recipe_is_trained_with_each_seed_on_the_same_text_for_the_same_time"),
    ("a row of the lab has the headroom of its safest layer", 'row["headroom"] = min(g.headroom for g in measured)',
     'row["headroom"] = max(g.headroom for g in measured)', "lab::test_a_row_of_the_table_is_of_its_worst_layer"),
    ("the parts of a CPU step are of all profiled steps", "e.self_cpu_time_total / 1e3 / times",
     "e.self_cpu_time_total / 1e3", "steps::test_a_profile_has_the_ms_of_the_ops_of_one_call"),
    ("NaN passes the check before a race", "if not all(e <= a for e, a in zip(errors, allowed, strict=True))",
     "if any(e > a for e, a in zip(errors, allowed, strict=True))", "bench::test_a_wrong_peer_is_left_out_with_a_line"),
    ("a copy's bytes count once, though it reads and writes", "0, 2 * source.nbytes, median_ms(",
     "0, source.nbytes, median_ms(", "bench::test_naives_operations_have_the_flops_and_move_the_tables_of_the_whole"),
    ("decoding's GB/s leave out the values", "speed = 2 * keys.nbytes / ms / 1e6", "speed = keys.nbytes / ms / 1e6",
     "decode::test_the_bench_of_a_token_writes_its_rows"),
    ("visible pairs are added up over the batch", "pairs += int(seen.sum()) / len(seen)", "pairs += int(seen.sum())",
     "bench::test_flops_are_those_of_the_pairs_that_the_mask_shows_and_flex_is_given_that_mask"),
    ("the speed beside the other side is upside down", "[their_ms / our_ms for", "[our_ms / their_ms for",
     "steps::test_the_speed_is_that_of_turns_side_by_side"),
    ("a trace of grouped heads shows another head's keys", "key_head = head * len(k) // len(q)",
     "key_head = head % len(k)", "story::test_a_runs_head_gives_what_the_model_computes_there"),
    ("a replayed batch has no dropout", "kept.network(attention, device).train", "kept.network(attention, device).eval",
     "probe::test_a_run_that_meets_nan_names_the_tile_and_keeps_the_batch_to_replay_it"),
    ("breakit.py row=0 traces the usual row", "head, row if cfg.row is None else cfg.row,", "head, cfg.row or row,",
     "story::test_the_worked_row_has_the_numbers_of_its_story"),
]  # fmt: skip
FAULTS = [Fault(*row) for row in TABLE]


class Outcome(NamedTuple):
    fault: Fault
    seconds: float
    noticed: str = ""  # the test that failed; empty: none
    slow: bool = False  # `make test` does not run it
    problem: str = ""  # why there is no outcome


def copy_of_the_tree(to: Path) -> Path:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.png")
    return Path(shutil.copytree(ROOT, to / "tree", ignore=left_out))


def sources(tree: Path) -> list[Path]:
    folders = [file for part in FOLDERS for file in (tree / part).glob("*.py")]
    return [*(tree / source for source in SOURCES), *folders]


def pattern(text: str) -> str:
    """What finds a fault's text with other breaks of its lines, as a formatter may choose them."""
    inner = text.strip()
    words = r"\s+".join(re.escape(word) for word in inner.split())
    flexible = re.sub(r"(\\[(\[{])", r"\1\\s*", re.sub(r"(\\[)\]}])", r"(?:,?\\s*)\1", words))
    before, after = text.partition(inner)[::2]
    return re.escape(before) + flexible + re.escape(after)


def places(fault: Fault, tree: Path) -> list[Path]:
    """The files with the fault's text, each as often as it stands there."""
    wanted = re.compile(pattern(fault.old))
    return [file for file in sources(tree) for _ in wanted.findall(file.read_text(encoding="utf-8"))]


def failed_tests(tree: Path, tests: list[str], *options: str) -> list[str]:
    """The names of the tests that fail. RuntimeError where pytest could not run them; no tests at all is none."""
    process = SERVER.Process(target=run_pytest, args=(tree, [*options, *tests]))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise RuntimeError(f"pytest took more than {SECONDS} s")
    said = (tree / SAID).read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", said, re.MULTILINE)
    if process.exitcode not in (0, 1, NO_TESTS) or (process.exitcode == 1) != bool(failed):
        raise RuntimeError(f"pytest left with {process.exitcode}: {said[-1000:]}")
    return failed


def run_pytest(tree: Path, options: list[str]) -> None:
    """Runs the tests of a tree in this process, which has imported nothing of ours but this file."""
    os.chdir(tree)
    with open(SAID, "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", *options]))


def plant(fault: Fault) -> Outcome:
    started = time.monotonic()
    names = [name.partition("::") for name in fault.tests.split()]
    tests = [f"tests/test_{file}.py{sep}{test}" for file, sep, test in names]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_the_tree(Path(folder))
        files = places(fault, tree)
        if len(files) != 1:
            return Outcome(fault, 0.0, problem=f"its text stands {len(files)} times in the code")
        text = files[0].read_text(encoding="utf-8")
        files[0].write_text(re.sub(pattern(fault.old), lambda _: fault.new, text), encoding="utf-8")
        # Code that cannot run would be noticed by anything: a fault has to be one that only a test can find.
        ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "E9,F821", str(files[0])]
        if subprocess.run(ruff, capture_output=True, check=False).returncode:
            return Outcome(fault, 0.0, problem="its text does not run")
        try:
            for marks in ["not slow", "slow"]:
                if failed := failed_tests(tree, tests, "-x", "-m", marks):
                    return Outcome(fault, time.monotonic() - started, failed[0], slow=marks == "slow")
        except RuntimeError as error:
            return Outcome(fault, time.monotonic() - started, problem=str(error))
    return Outcome(fault, time.monotonic() - started)


def main() -> int:
    os.environ["OMP_NUM_THREADS"] = "1"  # as in tests/conftest.py, which comes after torch here
    words = sys.argv[1:]
    faults = [fault for fault in FAULTS if not words or any(word in fault.what for word in words)]
    found = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for outcome in pool.map(plant, faults):
            by = outcome.problem or outcome.noticed.removeprefix("tests/") or "UNNOTICED"
            by += " (slow)" * outcome.slow
            print(f"{outcome.seconds:4.0f} s  {outcome.fault.what:<50}  {by}", flush=True)
            found.append(outcome)
    tests = sorted({outcome.noticed for outcome in found} - {""})
    with tempfile.TemporaryDirectory() as folder:
        void = failed_tests(copy_of_the_tree(Path(folder)), tests, "-m", "") if tests else []
    for test in void:
        print(f"{test} fails without any fault, too")
    noticed = [outcome for outcome in found if outcome.noticed and outcome.noticed not in void]
    fast = sum(not outcome.slow for outcome in noticed)
    print(f"{len(noticed)} of {len(faults)} faults noticed, {fast} of them by `make test`")
    return 0 if len(noticed) == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
