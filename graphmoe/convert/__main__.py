"""Convert weights: Hugging Face to graphmoe, and graphmoe folders or runs to Hugging Face.

python -m graphmoe.convert from=DeepSeek-V2-Lite to=weights/lite
python -m graphmoe.convert from=outputs/tiny to=exported/tiny dtype=bf16
"""

from graphmoe.checkpoint import CheckpointError
from graphmoe.config.arguments import emit, parse_args, run_tool
from graphmoe.config.ranges import number_of
from graphmoe.config.schema import ConfigError
from graphmoe.convert import ConvertArgs, target_of
from graphmoe.run.stored import kind_of


def main(argv: list[str]) -> None:
    args = parse_args(ConvertArgs, argv, prog="graphmoe.convert", places=("from", "to"))
    target_of(args, kind_of(args.from_))
    from graphmoe.convert.weights import convert  # imports torch

    try:
        document = convert(args)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    what = document["family"] or "graphmoe weights"
    step = "" if document["step"] is None else f", step {document['step']}"
    text = (
        f"{document['from']} ({kind_of(args.from_).value}{step}) -> {document['to']} ({what}): "
        f"{document['parameters']:,} parameters, {', '.join(document['dtypes'])}, "
        f"{number_of(len(document['files']), 'file')}, {document['bytes']:,} bytes, "
        f"{document['seconds']:.1f} s"
    )
    if document["command"]:
        text += (
            f"\nstart a run from it: {document['command']}\n"
            "on text of yours, behind that: data=files 'data.paths=[corpus/*.jsonl]'"
        )
    emit(document, text, args.format)


if __name__ == "__main__":
    run_tool(main)
